"use strict";
// Markdown as elements: headings, lists, quotes, tables, code, emphasis and links. No text is read as HTML.

const INLINE = new RegExp([
  "(?<ticks>`+)(?<code>.+?)\\k<ticks>(?!`)",
  "\\*\\*(?=\\S)(?<strong>.+?)\\*\\*(?!\\*)",
  "(?<![\\w*])(?<mark>[*_])(?=\\S)(?<emphasis>[^*_\\n]+)(?<=\\S)\\k<mark>(?![\\w*])",
  "\\[(?<label>[^\\]\\n]+)\\]\\((?<address>https?://[^\\s)]+)\\)",
].join("|"), "gsu");
const FENCE = /^(\s*)(`{3,}|~{3,})\s*([^\s`]*)/, HEADING = /^(#{1,6})\s+(.*?)\s*#*\s*$/, RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^\s*> ?/, ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/, TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const isBlank = line => !line.trim();
const indentOf = line => line.search(/\S|$/);

function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, strong, emphasis, label, address } = match.groups;
    parts.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (code !== undefined) parts.push(element("code", code.length > 2 ? code.replace(/^ (.*) $/s, "$1") : code));
    else if (strong !== undefined) parts.push(element("strong", ...inline(strong)));
    else if (emphasis !== undefined) parts.push(element("em", ...inline(emphasis)));
    else parts.push(Object.assign(element("a", ...inline(label)), { href: address, target: "_blank", rel: "noopener noreferrer" }));
  }
  return [...parts, text.slice(end)];
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

function table(lines) {
  const row = (name, line) => element("tr", ...cells(line).map(cell => element(name, ...inline(cell))));
  const [head, , ...body] = lines;
  const made = element("div", element("table", element("thead", row("th", head)), element("tbody", ...body.map(line => row("td", line)))));
  made.className = "table";
  return made;
}

function list(lines) {
  const [, , mark] = ITEM.exec(lines[0]), items = [];
  const depth = indentOf(lines[0]);
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= depth + 1) items.push({ width: match[0].length, lines: [line.slice(match[0].length)] });
    else items.at(-1).lines.push(line.slice(Math.min(indentOf(line), items.at(-1).width)));
  }
  const made = element(/\d/.test(mark) ? "ol" : "ul", ...items.map(item => element("li", ...unwrapped(markdown(item.lines.join("\n"))))));
  if (made.tagName === "OL") made.start = parseInt(mark, 10);
  return made;
}

// The text of an item needs no paragraph.
const unwrapped = blocks => blocks[0]?.tagName === "P" ? [...blocks[0].childNodes, ...blocks.slice(1)] : blocks;

function markdown(text) {
  const lines = text.split("\n"), blocks = [];
  let at = 0;
  const take = goesOn => {
    const begin = at;
    do at += 1; while (at < lines.length && goesOn(lines[at], at));
    return lines.slice(begin, at);
  };
  const beginsTable = index => lines[index].includes("|") && TABLE.test(lines[index + 1] ?? "") && lines[index + 1].includes("-");
  const begins = (line, index) => [FENCE, HEADING, RULE, QUOTE, ITEM].some(block => block.test(line)) || beginsTable(index);
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (isBlank(line)) at += 1;
    else if (fence) {
      const inside = take(next => !next.trim().startsWith(fence[2])).slice(1);
      at += 1;
      const code = element("code", inside.map(next => next.slice(Math.min(indentOf(next), fence[1].length))).join("\n"));
      blocks.push(Object.assign(element("pre", code), { title: fence[3] }));
    }
    else if (heading) blocks.push(element(`h${Math.min(heading[1].length + 1, 6)}`, ...inline(heading[2]))), at += 1;
    else if (RULE.test(line)) blocks.push(element("hr")), at += 1;
    else if (QUOTE.test(line)) blocks.push(element("blockquote", ...markdown(take(next => QUOTE.test(next)).map(next => next.replace(QUOTE, "")).join("\n"))));
    else if (ITEM.test(line)) {
      const depth = indentOf(line);
      blocks.push(list(take((next, index) => ITEM.test(next) || indentOf(next) > depth || isBlank(next) && goesOnAfter(index, depth))));
    }
    else if (beginsTable(at)) blocks.push(table(take(next => next.includes("|"))));
    else blocks.push(element("p", ...inline(take((next, index) => !isBlank(next) && !begins(next, index)).join("\n"))));
  }
  return blocks;

  function goesOnAfter(index, depth) {
    const next = lines.slice(index).find(line => !isBlank(line));
    return next !== undefined && (ITEM.test(next) || indentOf(next) > depth);
  }
}

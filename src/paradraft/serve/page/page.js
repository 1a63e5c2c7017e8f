"use strict";
// A conversation: asks the server, shows the answer as it comes, and compares speeds with and without drafts.

const at = id => document.getElementById(id);
const TEXT_TOKENS = 128;  // of a continued text, for which the protocol's own default is 16
const turns = [];
let leaving = null;

const number = id => at(id).value ? at(id).valueAsNumber : undefined;  // JSON leaves undefined out

function settings() {
  const isChat = at("chat").checked;
  return {
    isChat, isDrafting: at("drafting").checked, system: isChat ? at("system").value.trim() : "", key: at("key").value,
    sampling: { temperature: number("temperature"), seed: number("seed"), max_tokens: number("tokens") ?? (isChat ? undefined : TEXT_TOKENS) },
  };
}

function request(turn, isDrafting) {
  const { isChat, system, sampling } = turn.settings;
  const body = { ...sampling, stream: true, paradraft: true, ...(isDrafting ? {} : { speculation: "off" }) };
  if (!isChat) return ["/v1/completions", { ...body, prompt: turn.question }];
  const before = turns.slice(0, turns.indexOf(turn)).filter(each => each.settings.isChat);
  const messages = before.flatMap(each => [{ role: "user", content: each.question }, { role: "assistant", content: each.text }]);
  if (system) messages.unshift({ role: "system", content: system });
  return ["/v1/chat/completions", { ...body, messages: [...messages, { role: "user", content: turn.question }] }];
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event !== "data: [DONE]") yield JSON.parse(event.slice("data: ".length));
  }
}

async function failure(response) {
  const text = await response.text();
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`the server answers ${response.status}: ${text.slice(0, 200)}`);
  }
}

// Rounds of the answer, and at its end the server's own times.
async function* roundsOf(turn, isDrafting) {
  const [path, body] = request(turn, isDrafting), headers = { "Content-Type": "application/json" };
  if (turn.settings.key) headers.Authorization = "Bearer " + turn.settings.key;
  leaving = new AbortController();
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: leaving.signal });
  if (!response.ok) throw await failure(response);
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    yield { ...event.paradraft, timings: event.timings, reason: event.choices[0].finish_reason };
  }
}

function follow(change) {
  const isAtEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 60;
  change();
  if (isAtEnd) scrollTo(0, document.documentElement.scrollHeight);
}

function begin(question) {
  const turn = { question, text: "", settings: settings(), node: element("article"), tokens: element("div"), shown: element("div"), figures: element("p") };
  const answer = element("div", turn.shown, turn.tokens, turn.figures);
  turn.tokens.className = "tokens";
  turn.shown.className = "shown";
  turn.figures.className = "figures";
  answer.className = "answer" + (turn.settings.isChat ? " chat" : "");
  turn.node.append(Object.assign(element("p", question), { className: "question" }), answer);
  turns.push(turn);
  at("turns").append(turn.node);
  scrollTo(0, document.documentElement.scrollHeight);
  return turn;
}

function draw(turn) {
  if (turn.isDrawing) return;
  turn.isDrawing = true;
  requestAnimationFrame(() => {
    turn.isDrawing = false;
    follow(() => turn.shown.replaceChildren(...markdown(turn.text)));
  });
}

function add(turn, text, className) {
  if (!text) return;
  turn.text += text;
  follow(() => turn.tokens.append(Object.assign(element("span", text), { className })));
  if (turn.settings.isChat) draw(turn);
}

function report(turn, tokens, accepted, ending) {
  const drafted = turn.settings.isDrafting ? `, ${accepted} of ${tokens} drafted` : ", without drafts";
  turn.figures.textContent = (isFinite(turn.speed) ? `${turn.speed.toFixed(0)} tokens/s` : `${tokens} tokens`) + drafted + ending;
}

async function answer(turn) {
  let tokens = 0, accepted = 0, begun = null;
  turn.figures.textContent = "reads the prompt …";
  try {
    for await (const round of roundsOf(turn, turn.settings.isDrafting)) {
      add(turn, round.drafted_text, "drafted");
      add(turn, round.own_text, "own");
      begun ??= performance.now();
      tokens += round.tokens;
      accepted += round.accepted;
      turn.speed = round.timings?.predicted_per_second ?? tokens / ((performance.now() - begun) / 1000);
      report(turn, tokens, accepted, round.reason === "length" ? ", cut at the limit" : "");
    }
  } catch (error) {
    if (!turn.text) throw error;
    const why = error.name === "AbortError" ? "stopped" : error.message;
    turn.figures.textContent += turn.figures.textContent.includes("prompt") ? "" : `, ${why}`;
    return;
  }
  if (turn.settings.isDrafting) offer(turn);
}

// The same request once more without drafts: its speed, and whether its text is the same.
function offer(turn) {
  const button = Object.assign(element("button", "Compare without drafts"), { type: "button" });
  turn.figures.append(button);
  button.addEventListener("click", () => working(async () => {
    const said = element("span", "…");
    button.replaceWith(said);
    try {
      let text = "", speed = 0;
      for await (const round of roundsOf(turn, false)) {
        text += round.drafted_text + round.own_text;
        if (round.timings) speed = round.timings.predicted_per_second;
        follow(() => said.textContent = `without drafts: ${text.length} of ${turn.text.length} characters`);
      }
      const sameness = text === turn.text ? "the same text" : turn.settings.sampling.temperature > 0 ? "another sample" : "a different text, which is an error";
      said.textContent = `without drafts: ${speed.toFixed(0)} tokens/s; with drafts ${(turn.speed / speed).toFixed(2)} times as fast, ${sameness}`;
    } catch (error) {
      said.replaceWith(button);
      throw error;
    }
  }));
}

function setWorking(isWorking) {
  at("ask").hidden = isWorking;
  at("stop").hidden = !isWorking;
  at("fresh").disabled = isWorking;
}

async function working(work) {
  if (leaving) return;
  at("error").textContent = "";
  setWorking(true);
  try {
    await work();
  } catch (error) {
    if (error.name !== "AbortError") at("error").textContent = error.message;
  } finally {
    leaving = null;
    setWorking(false);
  }
}

function grow() {
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${at("prompt").scrollHeight + 2}px`;
}

at("form").addEventListener("submit", submitted => {
  submitted.preventDefault();
  working(async () => {
    const question = at("prompt").value, turn = begin(question);
    at("prompt").value = "";
    grow();
    try {
      await answer(turn);
    } catch (error) {
      // Without an answer there was no turn: the question goes back to be asked again.
      turns.pop();
      turn.node.remove();
      at("prompt").value = question;
      grow();
      throw error;
    }
  });
});
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", pressed => {
  if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
  pressed.preventDefault();
  if (!leaving) at("form").requestSubmit();
});
at("stop").addEventListener("click", () => leaving?.abort());
addEventListener("keydown", pressed => { if (pressed.key === "Escape") leaving?.abort(); });
at("coloured").addEventListener("change", () => document.body.classList.toggle("coloured", at("coloured").checked));
at("fresh").addEventListener("click", () => {
  turns.length = 0;
  at("turns").replaceChildren();
  at("error").textContent = "";
  at("prompt").focus();
});

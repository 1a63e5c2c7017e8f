"""The page at /: a chat that shows the model's answers, with drafted text marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby

import httpx2
import pytest

from paradraft.engine.engine import Engine
from tests.support.chromium import CHROMIUM, Page, chromium
from tests.support.serving import Serving, serving, until

TURNS = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}<|eos|>{% endfor %}a"
in_a_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium")


def test_nothing_comes_from_elsewhere(running: Serving) -> None:
    """Guards whoever opens the page: it needs no other server, and may reach none."""
    found = httpx2.get(running.url)
    assert found.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|src=|@import|url\(|{{", found.text)
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_it_begins_as_the_model_asks(engine: Engine, running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the temperature of generation_config.json, and that an instruct model is asked as in a chat."""
    assert 'id="temperature" value="0"' in (plain := httpx2.get(running.url).text) and 'id="chat" >' in plain
    monkeypatch.setattr(engine.target.tokenizer, "chat_template", TURNS)
    with serving(engine, defaults={"temperature": 0.7, "top_k": 5}, names=["<b>&amp;"]) as asked:
        found = httpx2.get(asked.url).text
    assert 'id="temperature" value="0.7"' in found and 'id="chat" checked>' in found
    assert "<h1>&lt;b&gt;&amp;amp;</h1>" in found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, running: Serving) -> Page:
    return opened(browser, running)


@pytest.fixture
def chat(browser: Page, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The page of a model that is asked conversations, with short answers."""
    monkeypatch.setattr(engine.target.tokenizer, "chat_template", TURNS)
    with serving(engine) as asked:
        page = opened(browser, asked)
        page.run("at('tokens').value = 12")
        yield page


def opened(page: Page, server: Serving) -> Page:
    page.call("Page.navigate", url=server.url)
    until(lambda: page.run(f"location.href === '{server.url}/' && document.readyState === 'complete'"))
    return page


def press(page: Page, key: str, modifiers: int = 0) -> None:
    pressed = {
        "key": key,
        "code": key,
        "windowsVirtualKeyCode": {"Enter": 13, "Escape": 27}[key],
        "modifiers": modifiers,
    }
    page.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **pressed)
    page.call("Input.dispatchKeyEvent", type="keyUp", **pressed)


def ended(page: Page) -> None:
    until(lambda: page.run("at('stop').hidden && !turns.some(turn => turn.isDrawing)"))


def ask(page: Page, question: str) -> None:
    """Types a question, and waits for the end of the answer."""
    page.run("at('prompt').focus()")
    page.call("Input.insertText", text=question)
    press(page, "Enter")
    ended(page)


@in_a_browser
def test_a_text_is_continued(engine: Engine, page: Page) -> None:
    """Guards a model that is not a chat model: its text is shown as it is, each part as what it is."""
    wanted = [
        (name, text)
        for chunk in engine.stream("hello", max_new_tokens=38)
        for name, text in (("drafted", chunk.drafted_text), ("own", chunk.own_text))
        if text
    ]
    page.run("at('tokens').value = 38")
    ask(page, "hello")
    assert page.run(
        "[...document.querySelectorAll('.tokens > *')].map(part => [part.className, part.textContent])"
    ) == [list(pair) for pair in wanted]
    assert {name for name, _ in groupby(wanted, key=lambda pair: pair[0])} == {"drafted", "own"}
    figures = page.run("document.querySelector('.figures').firstChild.textContent")
    assert re.fullmatch(r"\d+ tokens/s, \d+ of 38 drafted, cut at the limit", figures)
    colour = "getComputedStyle(document.querySelector('.drafted')).backgroundColor"
    assert page.run(colour) == "rgba(0, 0, 0, 0)"
    page.run("at('coloured').click()")
    assert page.run(colour) != "rgba(0, 0, 0, 0)"
    page.run("at('coloured').click()")


@in_a_browser
def test_the_speed_without_drafts(page: Page) -> None:
    """Guards the comparison: the same request again, whose text is the same."""
    page.run("at('tokens').value = 38")
    ask(page, "hello")
    page.run("document.querySelector('.figures button').click()")
    ended(page)
    said = page.run("document.querySelector('.figures span').textContent")
    assert re.fullmatch(r"without drafts: \d+ tokens/s; with drafts [\d.]+ times as fast, the same text", said)
    page.run("at('drafting').checked = false")
    ask(page, "hello")
    assert page.run("turns[0].text === turns[1].text && turns[1].node.querySelectorAll('.drafted').length === 0")


@in_a_browser
def test_a_conversation(engine: Engine, chat: Page) -> None:
    """Guards the history: each question is asked after all turns before it, and after the system prompt."""
    history = []
    for question in ("first", "second"):
        ask(chat, question)
        history.append({"role": "user", "content": question})
        history.append({"role": "assistant", "content": engine.chat(history, max_new_tokens=12).text})
    assert chat.run("turns.map(turn => turn.text)") == [each["content"] for each in history[1::2]]
    chat.run("at('fresh').click()")
    assert chat.run("document.querySelectorAll('article').length") == 0
    chat.run("at('system').value = 'be brief'")
    ask(chat, "first")
    messages = [{"role": "system", "content": "be brief"}, history[0]]
    assert chat.run("turns[0].text") == engine.chat(messages, max_new_tokens=12).text


@in_a_browser
def test_keys(chat: Page) -> None:
    """Guards Enter, which sends but with Shift, and Escape, which stops and leaves the text."""
    chat.run("at('prompt').focus()")
    chat.call("Input.insertText", text="one")
    press(chat, "Enter", modifiers=8)
    chat.call("Input.insertText", text="two")
    assert chat.run("[at('prompt').value, turns.length]") == ["one\ntwo", 0]
    chat.run("at('tokens').value = ''")
    press(chat, "Enter")
    until(lambda: chat.run("turns[0]?.text.length > 0"))
    press(chat, "Escape")
    ended(chat)
    assert chat.run("[at('prompt').value, turns.length, at('error').textContent]") == ["", 1, ""]
    assert chat.run("turns[0].text.length > 0 && turns[0].figures.textContent.endsWith('stopped')")


@in_a_browser
def test_what_is_refused_can_be_asked_again(chat: Page) -> None:
    chat.run("at('temperature').value = -1; at('form').noValidate = true")
    ask(chat, "hello")
    assert "temperature=-1" in chat.run("at('error').textContent")
    assert chat.run("[at('prompt').value, turns.length, document.querySelectorAll('article').length]") == [
        "hello",
        0,
        0,
    ]
    chat.run("at('temperature').value = 0; at('form').requestSubmit()")
    ended(chat)
    assert chat.run("[at('error').textContent, turns.length]") == ["", 1]


@in_a_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits(chat: Page, width: int) -> None:
    """Guards phones: nothing is wider than the window, also with long words, code and tables."""
    chat.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 500)
    ask(chat, "x")
    wide = "```\\n" + "y" * 300 + "\\n```\\n|" + "a|" * 60 + "\\n|" + "-|" * 60 + "\\n\\n" + "z" * 300
    chat.run("document.querySelector('.question').textContent = 'x'.repeat(300); at('settings').open = true")
    chat.run(f"turns[0].text = '{wide}'; draw(turns[0])")
    ended(chat)
    assert chat.run("document.documentElement.scrollWidth <= innerWidth")
    box = chat.run("(box => [box.left, box.right, box.bottom])(at('ask').getBoundingClientRect())")
    assert 0 <= box[0] and box[1] <= width and box[2] <= 844
    chat.call("Emulation.clearDeviceMetricsOverride")


@in_a_browser
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a *b* **c *d*** `e*f*`", "<p>a <em>b</em> <strong>c <em>d</em></strong> <code>e*f*</code></p>"),
        ("2 * 3 * 4, snake_case_name", "<p>2 * 3 * 4, snake_case_name</p>"),
        ("# A\n## B #\ntext", "<h2>A</h2><h3>B</h3><p>text</p>"),
        ("- a\n- b\n  1. c\n  2. d\n\nend", "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li></ul><p>end</p>"),
        ("3. a\n\n   more\n4. b", '<ol start="3"><li>a<p>more</p></li><li>b</li></ol>'),
        ("1. a\n   ```c\n   x\n     y\n   ```", '<ol><li>a<pre title="c"><code>x\n  y</code></pre></li></ol>'),
        ("```py\n# no heading\n<b>", '<pre title="py"><code># no heading\n&lt;b&gt;</code></pre>'),
        ("> q\n> *r*\n\n---", "<blockquote><p>q\n<em>r</em></p></blockquote><hr>"),
        ("a|b\n-|-\n1|`2`", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>"
         "<code>2</code></td></tr></tbody></table>"),
        ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
        ("[x](https://a.b) [y](javascript:c)", '<p><a href="https://a.b" target="_blank" rel="noopener noreferrer">'
         "x</a> [y](javascript:c)</p>"),
        ("**open `and\n\n", "<p>**open `and</p>"),
        ("-\n|\n*\n1.\n#\n>", None),
    ],
)  # fmt: skip
def test_markdown(page: Page, text: str, wanted: str | None) -> None:
    """Guards texts of models, half-written ones too: text is never HTML."""
    shown = page.run(f"element('div', ...markdown({json.dumps(text)})).innerHTML")
    assert (
        wanted is None
        or shown.replace('<div class="table">', "").replace("</div>", "").replace(' start="1"', "") == wanted
    )
    for length in range(len(text)):
        page.run(f"markdown({json.dumps(text[:length])})")

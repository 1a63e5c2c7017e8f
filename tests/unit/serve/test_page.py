"""The page at /: what it shows is the answer, with drafted text marked."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest

from paradraft.engine.engine import Engine
from tests.support.chromium import CHROMIUM, chromium
from tests.support.serving import Serving, serving, until


def test_nothing_comes_from_elsewhere(running: Serving) -> None:
    """Guards whoever opens the page: it needs no other server, and may reach none."""
    found = httpx2.get(running.url)
    assert found.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|src=|@import|url\(", found.text)
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


def test_it_begins_as_the_model_asks(engine: Engine, running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the temperature of generation_config.json, and that an instruct model is asked as in a chat."""
    assert 'id="temperature" value="0"' in (plain := httpx2.get(running.url).text) and 'id="chat" >' in plain
    turns = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}<|eos|>{% endfor %}a"
    monkeypatch.setattr(engine.target.tokenizer, "chat_template", turns)
    with serving(engine, defaults={"temperature": 0.7, "top_k": 5}) as asked:
        found = httpx2.get(asked.url).text
    assert 'id="temperature" value="0.7"' in found and 'id="chat" checked>' in found and "{{" not in found


@pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium")
def test_in_a_browser(engine: Engine, running: Serving, tmp_path: Path) -> None:
    wanted = list(engine.stream("hello", max_new_tokens=40))
    with chromium(tmp_path) as page:
        page.call("Page.navigate", url=running.url)
        until(lambda: page.run("document.readyState === 'complete' && !!document.getElementById('ask')"))

        def ask(script: str) -> None:
            page.run(f"{script}; document.getElementById('ask').click()")
            until(lambda: not page.run("document.getElementById('ask').disabled"))

        ask("document.getElementById('prompt').value = 'hello'; document.getElementById('tokens').value = 40")
        for name, texts in (
            ("drafted", [chunk.drafted_text for chunk in wanted]),
            ("own", [chunk.own_text for chunk in wanted]),
        ):
            shown = page.run(f"[...document.querySelectorAll('#answer .{name}')].map(part => part.textContent)")
            assert shown == [text for text in texts if text] != []
        assert re.fullmatch(r"\d+ tokens/s, \d+ rounds, \d+ tokens drafted", page.run("at('figures').textContent"))
        assert page.run("at('error').textContent") == ""
        ask("at('temperature').value = -1; at('form').noValidate = true")
        assert "temperature=-1" in page.run("at('error').textContent")
        ask("at('temperature').value = 0; at('drafting').checked = false; at('chat').checked = true")
        plain = engine.chat([{"role": "user", "content": "hello"}], max_new_tokens=40)
        assert page.run("at('answer').textContent") == plain.text
        assert page.run("document.querySelectorAll('#answer .drafted').length") == 0

"""Chat templates are programs in a model's files: one that never ends, or writes without end, refuses its request."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
from transformers import PreTrainedTokenizerFast

from paradraft.text import chat_template
from paradraft.text.chat_template import ask_text, end_of_turn, template_of
from paradraft.text.template_limits import MOST_CHARACTERS, limited
from tests.support.small_tokenizers import byte_level

ASK = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    monkeypatch.setattr(chat_template, "limited", partial(limited, 0.2))
    return byte_level()


def written(tokenizer: PreTrainedTokenizerFast, template: str) -> str:
    tokenizer.chat_template = template
    return ask_text(ASK, template_of(tokenizer))


@pytest.mark.parametrize(
    "template", [ENDLESS, "{% macro f(n) %}{{ f(n) if n else '' }}" + ENDLESS + "{% endmacro %}{{ f(0) }}"]
)
def test_a_template_without_end(asked: PreTrainedTokenizerFast, template: str) -> None:
    """Guards a server, and the loading of a file, whose template is tried there."""
    with pytest.raises(
        ValueError, match=r"fails at this conversation \(TimeoutError: it takes longer than 0\.2 seconds\)"
    ):
        written(asked, template)
    assert end_of_turn(asked) is None
    assert sys.gettrace() is None
    assert written(asked, "{{ messages[0].content }}") == "hello"


def test_a_template_that_writes_too_much() -> None:
    with pytest.raises(ValueError, match=f"it writes {MOST_CHARACTERS + 5} characters"):
        written(byte_level(), "{{ messages[0].content }}{{ 'x' * " + str(MOST_CHARACTERS) + " }}")


def test_other_threads_and_tracers_are_left_alone() -> None:
    """Guards coverage and debuggers."""
    seen = []

    def tracer(frame: object, event: str, _: object) -> None:
        seen.append(event)

    sys.settrace(tracer)
    try:
        with limited():
            others = []
            thread = threading.Thread(target=lambda: others.append(sys.gettrace()))
            thread.start()
            thread.join()
        assert sys.gettrace() is tracer and others == [None]
    finally:
        sys.settrace(None)

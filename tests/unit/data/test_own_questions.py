"""Questions that a model asks itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from paradraft import load
from paradraft.data.own_questions import own_questions, write_own_questions
from paradraft.engine.engine import Engine
from paradraft.models.runtime import Runtime

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def plain(family: Path) -> Engine:
    return load(str(family / "target"), drafter="none", runtime=Runtime(dtype="float64", compiled=False))


def test_a_model_asks_itself(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards own questions: each number is another one, always the same, also in batches; and templates that cannot be
    asked so."""
    tokenizer = plain.target.tokenizer
    with pytest.raises(ValueError, match="no chat template, so it cannot ask itself: name --prompts"):
        next(own_questions(plain, 0))
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    first = list(itertools.islice(own_questions(plain, 0), 3))
    assert len(set(first)) == 3 and list(itertools.islice(own_questions(plain, 1), 2)) == first[1:]
    assert list(itertools.islice(own_questions(plain, 0, batch_size=2), 3)) == first
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content | upper }}")
    with pytest.raises(ValueError, match=r"changes messages.*name --prompts"):
        next(own_questions(plain, 0))


def test_a_file_of_questions_is_continued(plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards interrupted runs: what is written stays, a torn line is written again, and no other file is added to."""
    monkeypatch.setattr(plain.target.tokenizer, "chat_template", TEMPLATE)
    whole, stopped, other = (tmp_path / name for name in ("whole.jsonl", "stopped.jsonl", "other.jsonl"))
    said: list[str] = []
    write_own_questions(plain, whole, 4, batch_size=3, report=said.append)
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [record["own"] for record in records] == [0, 1, 2, 3] and said[-1] == "4/4 questions"
    assert records[0]["messages"] == [{"role": "user", "content": next(own_questions(plain, 0))}]
    stopped.write_text(whole.read_text()[:-20])
    write_own_questions(plain, stopped, 4, batch_size=2, report=said.append)
    assert stopped.read_bytes() == whole.read_bytes()
    other.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="other questions: name another --out"):
        write_own_questions(plain, other, 4, batch_size=2, report=said.append)

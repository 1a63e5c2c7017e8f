"""Questions that a model asks itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from filelock import FileLock

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
    write_own_questions(plain, whole, 4, of="model", batch_size=3, report=said.append)
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [record["number"] for record in records] == [0, 1, 2, 3] and said[-1] == "4/4 questions"
    assert records[0]["messages"] == [{"role": "user", "content": next(own_questions(plain, 0))}]
    stopped.write_text(whole.read_text()[:-20])
    write_own_questions(plain, stopped, 4, of="model", batch_size=2, report=said.append)
    assert stopped.read_bytes() == whole.read_bytes()
    last = b'{"prompt": "by hand"}'  # without an end of line, as after a crash
    for content in (b'{"messages": []}\n', b"5\n", b"\n", b"\xff\n", last, last + b"\n" + last, b'{"asked by": "n'):
        other.write_bytes(content)
        with pytest.raises(ValueError, match=r"other\.jsonl holds other questions.*name another --out"):
            write_own_questions(plain, other, 4, of="model", batch_size=2, report=said.append)
        assert other.read_bytes() == content
    with FileLock(f"{whole}.lock"), pytest.raises(ValueError, match="being written by another run"):
        write_own_questions(plain, whole, 5, of="model", batch_size=2, report=said.append)
    with pytest.raises(ValueError, match="not this model's"):
        write_own_questions(plain, whole, 5, of="other", batch_size=2, report=said.append)


def test_questions_have_any_characters(plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards separators of lines other than \\n, which models write, and lines that are torn within a character."""
    texts = ["a\u2028b", "c\u0085d", "雨"]
    monkeypatch.setattr(
        "paradraft.data.own_questions.own_questions", lambda engine, first, *, batch_size: iter(texts[first:])
    )
    file = tmp_path / "mine.jsonl"
    write_own_questions(plain, file, 2, of="m", batch_size=1, report=print)
    write_own_questions(plain, file, 3, of="m", batch_size=1, report=print)
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index("雨".encode()) + 1])
    write_own_questions(plain, file, 3, of="m", batch_size=1, report=print)
    assert file.read_bytes() == whole
    records = [json.loads(line) for line in whole.decode().split("\n")[:-1]]
    assert [record["messages"][0]["content"] for record in records] == texts

"""`paradraft train-judge` as a user meets it: a head from questions with answers, which `--verify` and `bench` use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paradraft import load
from paradraft.formats.judge_head import read_judge
from paradraft.judge.labels import Labeller
from paradraft.text.final_number import final_number
from tests.e2e.conftest import INTERRUPTED, Paradraft, assert_mistake
from tests.support.jsonl import write_lines

NEW = 48


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions that the pocket target answers with some number, which is called the right one."""
    beginnings = ("numbers = [0, 1,", "def test():\n    values = [", "assert f(1) == 2\nassert f(2) == 3, f(")
    asked = [f"{text} {number}, {number + 1}, {number + 2}" for number in range(8) for text in beginnings]
    answers = load("pocket").generate([f"Question: {text}\nAnswer:" for text in asked], max_new_tokens=NEW)
    marked = [(text, final_number(answer.text)) for text, answer in zip(asked, answers, strict=True)]
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    write_lines(file, [{"question": text, "answer": f"#### {right}"} for text, right in marked if right is not None])
    assert len(file.read_text().splitlines()) >= 10
    return file


def test_a_head_is_trained_and_used(
    paradraft: Paradraft, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way: interrupted work goes on where it stopped, a second run labels nothing again, and the head
    is a rule that says in every output that it is not lossless; `bench` counts right answers."""
    head = tmp_path / "judge.safetensors"
    asked = [
        "--target",
        "pocket",
        "--draft",
        "pocket",
        "--questions",
        questions,
        "--max-new-tokens",
        NEW,
        "--out",
        head,
    ]
    labelled, left = Labeller._labelled, [3]

    async def stopping(self: Labeller, question: object) -> object:
        text = await labelled(self, question)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr(Labeller, "_labelled", stopping)
    assert paradraft("train-judge", *asked).code == INTERRUPTED
    monkeypatch.setattr(Labeller, "_labelled", labelled)
    labels = tmp_path / "judge.safetensors.labels.jsonl"
    before = labels.read_text()
    assert not head.exists() and len(before.splitlines()) == 3
    first = paradraft("train-judge", *asked)
    assert first.code == 0 and labels.read_text().startswith(before)
    assert "On other answers the head accepts" in first.out
    assert first.out.endswith(f"decode with it by --verify judge:head={head}: not lossless\n")
    whole, written = labels.read_bytes(), read_judge(head)
    again = paradraft("train-judge", *asked, "--num-questions", 2)
    assert again.out == first.out and labels.read_bytes() == whole
    assert torch.equal(read_judge(head).weights, written.weights) and read_judge(head).facts == written.facts
    for more in (["--dtype", "float64"], ["--max-new-tokens", NEW - 1]):
        assert_mistake(paradraft("train-judge", *asked, *more), "use the same settings, or name another --out")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(questions.read_text().splitlines(keepends=True)[1:]))
    outcome = paradraft("train-judge", *asked, "--questions", other)
    assert_mistake(outcome, "answers what is not asked now: ask all that was asked before, or name another --out")
    assert labels.read_bytes() == whole

    rule = f"judge:head={head}:threshold=0.05"
    drafting = ["--target", "pocket", "--drafter", "pard"]
    answer = paradraft("generate", *drafting, "--verify", rule, "--prompt", "x = ", "--max-new-tokens", 20, "--json")
    assert json.loads(answer.out)["lossless"] is False and "judge decoding is not lossless" in answer.err
    assert_mistake(paradraft("audit", *drafting, "--verify", rule), "judge decoding is not lossless", "use match")
    result = tmp_path / "bench.json"
    benched = paradraft(
        "bench", "--target", "pocket", "--methods", "ar,pard", "--verify", rule, "--task", "gsm8k", "--task-data",
        questions, "--num-prompts", 8, "--max-new-tokens", NEW, "--runs", 1, "--json", result,
    )  # fmt: skip
    assert benched.code == 0 and "right: of answers" in benched.out
    figures = json.loads(result.read_text())["methods"]
    plain, judged = (next(each for spec, each in figures.items() if each["method"] == name) for name in ("ar", "pard"))
    assert plain["right"] == 1.0 and 0 <= judged["right"] <= 1 and judged["identical_to_ar"] is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "shape:tiny-target"], "'shape:tiny-target' has random weights, so no answer is right"),
        (["--target", "gone", "--draft", "pocket"], "unknown model 'gone'"),
        (["--questions", "gone.jsonl"], "gone.jsonl"),
        (["--out", "nowhere/head"], "there is no folder"),
        (["--num-questions", 0], "greater than or equal to 1"),
        (["--out", "a:b"], "--out a:b: the settings of a rule are separated by ':', so choose a path without"),
        (["--max-new-tokens", 600], "no question fits into 512 tokens, with 600 new tokens: lower --max-new-tokens"),
    ],
)
def test_mistakes(paradraft: Paradraft, tmp_path: Path, more: list[object], message: str) -> None:
    """Guards users: one line, and nothing half-written."""
    write_lines(tmp_path / "questions.jsonl", [{"question": "a", "answer": "1"}])
    asked = ["--target", "pocket", "--questions", tmp_path / "questions.jsonl", "--out", tmp_path / "head", *more]
    assert_mistake(paradraft("train-judge", *asked), message)
    assert [file.name for file in tmp_path.iterdir()] == ["questions.jsonl"]


def test_questions_without_a_number_are_named(paradraft: Paradraft, tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", [{"question": "a", "answer": "1"}, {"question": "b", "answer": "none"}])
    asked = ["--target", "pocket", "--draft", "pocket", "--out", tmp_path / "head"]
    outcome = paradraft("train-judge", *asked, "--questions", tmp_path / "questions.jsonl")
    assert_mistake(outcome, "questions.jsonl', question 2: its answer has no number, remove it")
    assert [file.name for file in tmp_path.iterdir()] == ["questions.jsonl"]

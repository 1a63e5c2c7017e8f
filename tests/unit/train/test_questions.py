"""What is asked: ids, seeds, and the turns of conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradraft.train.questions import EOS, ID, LENGTH, Answer, Question, next_prompt, read_questions, record_of
from tests.jsonl import write_lines
from tests.unit.train.asking import talk


def read(tmp_path: Path, *records: object, samples: int = 1) -> list[Question]:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, records)
    return read_questions(file, samples)


def said(*texts: str, reason: str = EOS) -> list[Answer]:
    return [Answer(text=text, finish_reason=reason, tokens=1) for text in texts]


def test_an_answer_is_known_by_its_line(tmp_path: Path) -> None:
    """Guards against answers that are taken for others' because the file has grown or was sorted since; the same
    line twice wants two answers, and other kept keys make another line."""
    a, b = {"prompt": "a"}, {"messages": talk("b")}
    ids = [question.id for question in read(tmp_path, a, b, a)]
    assert len(set(ids)) == 3
    again = [question.id for question in read(tmp_path, {**a, "note": 1}, b, a, a, samples=2)]
    assert len(set(again)) == 8
    assert set(ids) < set(again)


def test_seeds_differ_by_run_question_sample_and_turn(tmp_path: Path) -> None:
    """Guards against samples that are all the same, and against seeds that servers with 32 bits refuse."""
    questions = read(tmp_path, {"prompt": "a"}, {"prompt": "b"}, samples=3)
    seeds = [question.seed(seed, turn) for question in questions for seed in (0, 1) for turn in (0, 1)]
    assert len(set(seeds)) == 6 * 2 * 2
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_prompt_gets_its_response(tmp_path: Path) -> None:
    """Guards the format that training reads; the old response goes, all other keys stay."""
    (question,) = read(tmp_path, {"prompt": "a", "response": "old", "id": 7, "finish_reason": "eos"})
    assert next_prompt(question, []) == "a"
    answers = said("new", reason=LENGTH)
    assert next_prompt(question, answers) is None
    expected = {"prompt": "a", "response": "new", "id": 7, "finish_reason": "length", ID: question.id}
    assert record_of(question, answers) == expected


def test_every_turn_of_the_assistant_is_answered_anew(tmp_path: Path) -> None:
    """Guards against later turns that answer the old turns before them, and against an unanswered last question."""
    system = {"role": "system", "content": "s"}
    (question,) = read(tmp_path, {"messages": [system, *talk("a", "old", "b", "old", "c")], "from": "x"})
    assert next_prompt(question, []) == [system, *talk("a")]
    assert next_prompt(question, said("1")) == [system, *talk("a", "1", "b")]
    assert next_prompt(question, said("1", "2")) == [system, *talk("a", "1", "b", "2", "c")]
    assert next_prompt(question, said("1", "2", "3")) is None
    expected = {"messages": [system, *talk("a", "1", "b", "2", "c", "3")], "from": "x", "finish_reason": "eos"}
    assert record_of(question, said("1", "2", "3")) == {**expected, ID: question.id}


def test_what_the_old_turn_had_besides_text_goes(tmp_path: Path) -> None:
    """Guards against the old turn's reasoning beside the new turn's text."""
    old = {"role": "assistant", "content": "old", "reasoning_content": "because"}
    (question,) = read(tmp_path, {"messages": [*talk("a"), old]})
    assert record_of(question, said("new"))["messages"] == talk("a", "new")


def test_a_conversation_ends_with_a_turn_that_was_cut(tmp_path: Path) -> None:
    """Guards against a user who answers half a sentence, and against an end of turn that training would see there."""
    (question,) = read(tmp_path, {"messages": talk("a", "old", "b", "old")})
    cut = said("1", reason=LENGTH)
    assert next_prompt(question, cut) is None
    record = record_of(question, cut)
    assert (record["messages"], record["finish_reason"]) == (talk("a", "1"), "length")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ([], "JSON object"),
        ({}, "either"),
        ({"prompt": "a", "messages": talk("a")}, "either"),
        ({"prompt": ""}, "''"),
        ({"prompt": None}, "None"),
        ({"prompt": "a", "text": "b"}, '"text"'),
        ({"messages": []}, "[]"),
        ({"messages": "a"}, "'a'"),
        ({"messages": ["a"]}, "message 1"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 1 has none of the roles"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 has no content"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no user turn"),
        ({"messages": talk("a", "b", first="assistant")}, "message 1 is the assistant's, before"),
        ({"messages": [*talk("a", "b"), *talk("c", first="assistant")]}, "message 3 is the assistant's like"),
    ],
)
def test_a_line_that_cannot_be_answered_is_named(tmp_path: Path, record: object, named: str) -> None:
    """Guards against finding out after hours, and against training on a key that is not the answer."""
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: ") as error:
        read(tmp_path, {"prompt": "a"}, record)
    assert named in str(error.value)


def test_text_that_cannot_be_written_again_is_named(tmp_path: Path) -> None:
    """Guards against half a surrogate in a key that is only kept: it would stop the run when the answer is written."""
    with pytest.raises(ValueError, match="line 1: not valid text"):
        read(tmp_path, {"prompt": "a", "note": "\ud800"})


def test_at_least_one_sample(tmp_path: Path) -> None:
    """Guards against a run that answers nothing and calls it success."""
    with pytest.raises(ValueError, match="samples=0"):
        read(tmp_path, {"prompt": "a"}, samples=0)

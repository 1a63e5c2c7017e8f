"""What is asked: ids, seeds, and the turns of conversations."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from paradraft.data.questions import EOS, ID, LENGTH, Answer, Question, next_prompt, read_questions, record_of
from paradraft.sources import records
from tests.support.asking import talk
from tests.support.jsonl import write_lines


def read(tmp_path: Path, *records: object, samples: int = 1) -> list[Question]:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, records)
    return read_questions(file, samples)


def test_amds_conversations_are_asked(tmp_path: Path) -> None:
    """Guards AMD's training data as prompts: they stand in `.json` files, and what was answered is asked anew."""
    file = tmp_path / "example.json"
    turns = [{"human": "a", "assistant": "old"}, {"human": "b"}]
    file.write_text(json.dumps([{"conversation": turns, "id": 3}]))
    (question,) = read_questions(file, 1)
    assert next_prompt(question, []) == talk("a")
    assert next_prompt(question, said("new")) == talk("a", "new", "b")
    assert record_of(question, said("new", "c")) == {
        "messages": talk("a", "new", "b", "c"), "id": 3, "finish_reason": EOS, ID: question.id,
    }  # fmt: skip


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


def test_ids_are_those_of_former_versions(tmp_path: Path) -> None:
    """Guards files of answers that exist: with other ids a run that goes on would refuse them."""
    prompt = {"prompt": "ü", "n": [1.5, None, 1e3]}
    chat = {"messages": [{"role": "user", "content": "a"}], "z": 1, "b": {"y": True, "x": -0.0}}
    ids = [question.id for question in read(tmp_path, prompt, chat, prompt)]
    assert ids == ["24ecf6069c84af7f.0.0", "ac6e76fd57e0a813.0.0", "24ecf6069c84af7f.1.0"]


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


def test_other_shapes_of_conversations(tmp_path: Path) -> None:
    """Guards data sets as they are published: ShareGPT's names, a question with an old answer or without one. What
    became messages does not stand beside them, further keys do."""
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "old"}], "n": 1}
    questions = read(tmp_path, shared, {"user": "a", "assistant": "old", "n": 1}, {"user": "a", "n": 1})
    for question in questions:
        assert next_prompt(question, []) == talk("a")
        expected = {"messages": talk("a", "new"), "n": 1, "finish_reason": "eos", ID: question.id}
        assert record_of(question, said("new")) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": []},
        {"conversations": [{"from": ["human"], "value": "a"}]},
        {"conversations": [{"from": "human", "value": None}]},
        {"user": 3},
        {"assistant": "a"},
    ],
)
def test_a_broken_conversation_is_named(tmp_path: Path, record: object) -> None:
    """Guards against tracebacks and empty questions from the shapes that become messages."""
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: (expected either|message 1 has no)"):
        read(tmp_path, {"user": "a"}, record)


def test_columns(tmp_path: Path) -> None:
    """Guards data with names of its own: only what is named is read, and a misspelt name is told with its line."""
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"instruction": "a", "output": "old", "text": "b", "n": 1}])
    for columns in ({"user": "instruction"}, {"user": "instruction", "assistant": "output"}):
        (question,) = read_questions(file, 1, columns)
        assert record_of(question, said("new")) == {
            "messages": talk("a", "new"), "finish_reason": "eos", ID: question.id
        }  # fmt: skip
    (question,) = read_questions(file, 1, {"prompt": "instruction"})
    assert next_prompt(question, []) == "a"
    with pytest.raises(ValueError, match=r"line 1: there is no 'instr', which `columns` names; there are instruction"):
        read_questions(file, 1, {"prompt": "instr"})


def write_table(file: Path, records: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(records), file)


def test_parquet_holds_the_same_questions(tmp_path: Path) -> None:
    """Guards answers that exist, where the same records are stored otherwise: keys that a row has not are null."""
    records = [{"prompt": "a", "n": 1}, {"prompt": "b"}]
    write_table(tmp_path / "prompts.parquet", records)
    found = read_questions(tmp_path / "prompts.parquet", 1)
    assert [question.id for question in found] == [question.id for question in read(tmp_path, *records)]
    assert found[1].place.endswith("prompts.parquet, row 2")


def test_what_json_does_not_know_is_written_the_same_every_time(tmp_path: Path) -> None:
    """Guards against a crash at the first answer of a table with dates or bytes, a NaN that training refuses to read,
    and ids that are others in the next run."""
    values = {"at": datetime(2026, 11, 21, 9), "on": date(2026, 11, 21), "costs": Decimal("1.50"), "raw": [b"ab"]}
    write_table(tmp_path / "prompts.parquet", [{"prompt": "a", "score": float("nan"), "inner": values}])
    (question,), (again,) = (read_questions(tmp_path / "prompts.parquet", 1) for _ in range(2))
    assert question.id == again.id
    written = json.loads(json.dumps(record_of(question, said("new")), allow_nan=False))
    inner = {"at": "2026-11-21 09:00:00", "on": "2026-11-21", "costs": "1.50", "raw": ["YWI="]}
    assert (written["score"], written["inner"]) == (None, inner)


def test_a_dataset_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards configuration and split, and against an image whose text has an address in it, so that its id would be
    another in the next run; what `columns` does not name is no trouble."""
    loaded: list[object] = []

    def load_dataset(*names: object, **settings: object) -> list[dict[str, object]]:
        loaded.append((*names, settings))
        return [{"question": "a", "image": object()}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(records.HfApi, "dataset_info", lambda *_, **__: None)
    source = Path("some/data/main:test")
    (question,) = read_questions(source, 1, {"user": "question"})
    assert loaded == [("some/data", "main", {"split": "test"})]
    assert (question.place, next_prompt(question, [])) == (f"{source}, record 1", talk("a"))
    with pytest.raises(
        ValueError, match="record 1: 'image' cannot be written as JSON: a value is of type object; name the"
    ):
        read_questions(source, 1)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("prompts.txt", b"what?", r"prompt file '.*prompts\.txt': \.txt is not read, write \.jsonl or \.parquet"),
        ("prompts", b"what?", r"prompt file '.*prompts': plain text is not read, write \.jsonl or \.parquet"),
        ("prompts.csv", b"what?", r"prompt file '.*prompts\.csv': \.csv is not read"),
        ("prompts.parquet", b"what?", r"prompt file '.*prompts\.parquet' cannot be read: "),
        ("prompts.jsonl", b"\n", r"prompt file '.*prompts\.jsonl' is empty"),
        ("prompts.jsonl", b'{"prompt": "\xff"}', r"prompt file '.*prompts\.jsonl' is not UTF-8 text"),
        ("none.jsonl", None, r"prompt file '.*none\.jsonl' does not exist"),
        ("none", None, r"prompt file '.*none' does not exist"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, named: str) -> None:
    """Guards against a text that is taken for one question, an answer to nothing, and a wrong path that is looked up
    among the datasets."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=named):
        read_questions(tmp_path / name, 1)

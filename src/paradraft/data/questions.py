"""Questions: the records of a source, each once per sample.

A record is `{"prompt": …}` or `{"messages": […]}`; its further keys are kept. Conversations in other formats,
and a single question, become messages. The assistant's turns of a conversation are regenerated one after the other:
each sees the new answers before it. A final turn of the user is answered too.

The `answer_id` of an answer depends on the content of the record and not on its line, so that the source may grow or
be sorted between two runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paradraft.sources.records import conversation_of, object_of, renamed, rows
from paradraft.text.chat_template import Message

ID = "answer_id"
EOS, LENGTH = "eos", "length"
"""Finish reasons: the target ended the answer, or the limit cut it."""
ROLES = ("system", "user", "assistant")
OTHER_SHAPES = ("conversations", "conversation", "user", "assistant")
"""Keys that are replaced by messages."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A record to answer once.

    Args:
        place: file and line of the record, for error messages.
        id: digest of the record, index among equal records, and index of the sample.
    """

    place: str
    record: dict[str, Any]
    id: str

    def seed(self, seed: int, turn: int) -> int:
        """Seed of a turn, below 2**31: depends on the run's seed, the question and the turn only.

        >>> Question(place="", record={}, id="a.0.0").seed(7, 0)
        1810909255
        """
        digest = hashlib.sha256(f"{seed} {self.id} {turn}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 2**31


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn as the target wrote it: text without the end token, finish reason, and count of tokens with it."""

    text: str
    finish_reason: str
    tokens: int


def read_questions(source: Path, samples: int, columns: Mapping[str, str] | None = None) -> list[Question]:
    """Reads the questions of a source.

    Args:
        columns: the source's names for the columns of `paradraft.sources.records`.

    Raises:
        ValueError: as `rows`; or a record (named by its index, from 1) has no prompt, a conversation that cannot
            be answered, or a value that cannot be written; or there is no record; or samples is below 1.
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: ask for at least 1 answer per prompt")
    questions = []
    seen: Counter[str] = Counter()
    for place, row in rows(source, "prompt file", '{"prompt": "some text"}'):
        try:
            record = _record(row, columns or {})
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
        for sample in range(samples):
            questions.append(Question(place=place, record=record, id=f"{digest}.{seen[digest]}.{sample}"))
        seen[digest] += 1
    if not questions:
        raise ValueError(f"prompt file {str(source)!r} is empty")
    return questions


def _record(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Turns a row into a record with a prompt, or with messages, that can be answered."""
    record = object_of(renamed(row, columns))
    if not record.keys() & {"prompt", "messages"}:
        # The assistant's text is not used, so a single question is a conversation too.
        messages = conversation_of({"assistant": "", **record})
        if messages is not None:
            kept = {key: value for key, value in record.items() if key not in OTHER_SHAPES}
            record = {"messages": messages, **kept}
    if problem := _problem(record):
        raise ValueError(problem)
    return record


def next_prompt(question: Question, answers: Sequence[Answer]) -> str | list[Message] | None:
    """Returns the next prompt after these answers: a text, a conversation, or None at the end."""
    if "prompt" in question.record:
        return None if answers else str(question.record["prompt"])
    turns = turns_of(question.record["messages"])
    if len(answers) == len(turns) or (answers and answers[-1].finish_reason == LENGTH):
        return None
    return _with_answers(question.record["messages"], answers)[: turns[len(answers)]]


def record_of(question: Question, answers: Sequence[Answer]) -> dict[str, Any]:
    """Inserts the answers, at least one, into the question's record, which makes it training data.

    A conversation ends with the last answer, so nothing follows a turn that was cut.
    """
    last = answers[-1]
    if "prompt" in question.record:
        content: dict[str, Any] = {"response": last.text}
    else:
        messages = question.record["messages"]
        content = {"messages": _with_answers(messages, answers)[: turns_of(messages)[len(answers) - 1] + 1]}
    return {**question.record, **content, "finish_reason": last.finish_reason, ID: question.id}


def turns_of(messages: list[Message]) -> list[int]:
    """Indices of the answers in a conversation.

    >>> turns_of([{"role": "user"}, {"role": "assistant"}, {"role": "user"}])
    [1, 3]
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return turns if messages[-1]["role"] == "assistant" else [*turns, len(messages)]


def _with_answers(messages: list[Message], answers: Sequence[Answer]) -> list[Message]:
    """Replaces the first turns of the assistant; the later ones stay as they are."""
    result = [*messages, {}]
    for i, answer in zip(turns_of(messages), answers, strict=False):
        result[i] = {"role": "assistant", "content": answer.text}
    return result


def _problem(record: dict[str, Any]) -> str | None:
    """Reason why a record cannot be answered; None if it can."""
    if "text" in record:
        return 'it has a key "text", which training would read instead of the answer: rename it'
    if ("prompt" in record) == ("messages" in record):
        return 'expected either {"prompt": "some text"} or {"messages": [{"role": "user", "content": "some text"}]}'
    if "prompt" in record:
        is_text = isinstance(record["prompt"], str) and record["prompt"]
        return None if is_text else f"the prompt is {record['prompt']!r}: give some text"
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        return f"messages is {messages!r}: give a list of messages"
    roles: list[object] = []
    for index, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {index} has none of the roles {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {index} has no content that is text"
        if message["role"] == "assistant" and "user" not in roles:
            return f"message {index} is the assistant's, before the user said anything: remove it"
        if message["role"] == "assistant" and roles[-1] == "assistant":
            return f"message {index} is the assistant's like the one before it: join the two"
        roles.append(message["role"])
    return None if "user" in roles else "the conversation has no user turn"

"""A record, whatever its source calls the values and however it writes a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
COLUMNS = ("text", "prompt", "response", "messages", "user", "assistant", "finish_reason")
"""The names that a record's values may have."""
SHARE_GPT = {"human": "user", "gpt": "assistant"}


def check_columns(columns: Mapping[str, object]) -> None:
    """Raises ValueError if `columns` does not say by which names a source calls `COLUMNS`."""
    for ours, theirs in columns.items():
        if ours not in COLUMNS:
            raise ValueError(f"columns: {ours!r} is none of {', '.join(COLUMNS)}")
        if not isinstance(theirs, str):
            raise ValueError(f"columns: {ours!r} is {theirs!r}: give the name that it has in the data")


def renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The values that `columns` names, and no others; the whole record where it names none.

    Raises:
        ValueError: one of them is not there.
    """
    for theirs in columns.values():
        if theirs not in record:
            raise ValueError(f"there is no {theirs!r}, which `columns` names; there are {', '.join(record)}")
    return {ours: record[theirs] for ours, theirs in columns.items()} if columns else dict(record)


def conversation_of(record: Mapping[str, Any]) -> list[Message] | None:
    """The messages of a record, in any of the forms below; None if there are none.

    A conversation may be written as `messages`, as ShareGPT does (`conversations`), as AMD's training data do
    (`conversation`, one object for each turn of both), or as one turn.

    >>> conversation_of({"user": "a", "assistant": "b"})
    [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    >>> conversation_of({"conversation": [{"human": "a", "assistant": "b"}, {"human": "c"}]})
    [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}, {'role': 'user', 'content': 'c'}]
    """
    match record:
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            return list(messages)
        case {"conversations": [_, *_] as turns} if all(isinstance(turn, dict) for turn in turns):
            return [
                {"role": SHARE_GPT.get(str(turn.get("from")), turn.get("from")), "content": turn.get("value")}
                for turn in turns
            ]
        case {"conversation": [_, *_] as exchanges} if all(map(_is_exchange, exchanges)):
            return [
                {"role": role, "content": exchange[key]}
                for exchange in exchanges
                for role, key in (("user", "human"), ("assistant", "assistant"))
                if key in exchange
            ]
        case {"user": str(user), "assistant": str(assistant)}:
            return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return None


def _is_exchange(turn: object) -> bool:
    """Whether this is a question with its answer, or a question alone, as AMD's training data write them."""
    return isinstance(turn, dict) and "human" in turn and turn.keys() <= {"human", "assistant"}

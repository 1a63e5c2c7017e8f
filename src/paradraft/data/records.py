"""Records, to train on or to be answered: where they come from and what their keys mean.

Sources are text, JSONL, JSON, Parquet, and Hugging Face datasets.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from paradraft.digests import file_digest
from paradraft.sources.hub import HTTPError
from paradraft.text.chat_template import Message


def read_object(text: str, place: str, example: str) -> dict[str, Any]:
    """Reads a JSON object whose texts can be tokenized, sent and written.

    Args:
        text: what the user wrote.
        place: where, for the complaint.
        example: an object as it is expected there.

    Raises:
        ValueError: it is no JSON object, or has half a character or a number in it that is none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    return checked_object(found, place, example)


def checked_object(found: object, place: str, example: str) -> dict[str, Any]:
    """Returns a value that was read from JSON, if it is an object whose texts can be tokenized, sent and written.

    Args:
        found: the value.
        place: where it stands, for the complaint.
        example: an object as it is expected there.

    Raises:
        ValueError: it is no object, or has half a character or a number in it that is none.
    """
    if not isinstance(found, dict):
        raise ValueError(f"{place}: expected a JSON object such as {example}")
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: not valid text ({error.reason})") from None
    except ValueError:
        raise ValueError(f"{place}: not JSON, which has no NaN and no infinity: write null") from None
    return found


def object_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of a row, the same in every run.

    Dates, durations, decimals and UUIDs become texts, bytes base64, NumPy's arrays and numbers Python's, and what is
    no finite number null.

    Raises:
        ValueError: a value is nothing of that, such as an image.

    Example:
        >>> object_of({"prompt": "a", "on": date(2026, 11, 21), "score": float("nan"), "raw": [b"ab"]})
        {'prompt': 'a', 'on': '2026-11-21', 'score': None, 'raw': ['YWI=']}
    """
    found = {}
    for key, value in row.items():
        try:
            text = json.dumps(value, default=_in_json)
        except TypeError as error:
            raise ValueError(f"{key!r} cannot be written as JSON: {error}; name the columns that you want") from None
        found[key] = json.loads(text, parse_constant=lambda _: None)
    return found


def _in_json(value: object) -> object:
    """What stands in JSON for a value that it does not know; the text of any other object may hold its address."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


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


Record = dict[str, Any]
TABLES = {".jsonl", ".json", ".parquet"}
"""Suffixes of files that hold many records."""
NOT_TEXT = {*TABLES, ".ndjson", ".csv", ".tsv", ".arrow", ".gz", ".zst", ".zip", ".xz"}
"""Suffixes of files whose characters are no text to learn; those of `TABLES` are here for other spellings."""
RECORD_KEYS = {"text", "prompt", "response", "messages", "conversation", "conversations", "user", "assistant"}
"""Keys by which a JSON object is known as a record, and not as a wrapper around a list of records."""


def records(source: Path, what: str) -> Iterator[tuple[str, Record]]:
    """Reads one source, record by record.

    Args:
        source: as of `rows`; any other file is one text.
        what: what it is for, for complaints: "training data".

    Yields:
        What to call the record in a complaint, and the record.

    Raises:
        ValueError: as `rows`.
    """
    if not source.is_file() or source.suffix in TABLES or source.suffix.lower() in NOT_TEXT:
        yield from rows(source, what, '{"text": "some text"}')
        return
    try:
        yield str(source), {"text": source.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(source)!r} is not UTF-8 text ({error.reason})") from None


def rows(source: Path, what: str, example: str) -> Iterator[tuple[str, Record]]:
    """Reads one source that holds records.

    Args:
        source: a `.jsonl`, `.json` or `.parquet` file, or a pipe of JSONL; what is no file is a Hugging Face dataset:
            `name`, `name:split` (`train` by default) or `name/configuration:split`. A `.json` file holds an array of
            records, an object with one array of records in it, or a record in each line.
        what: what it is for, for complaints.
        example: a line of JSONL, for complaints.

    Yields:
        What to call the record in a complaint, and the record.

    Raises:
        ValueError: the source does not exist, is another file or cannot be read, a record is no JSON object, or an
            object has several arrays that may be the records.
    """
    if source.is_fifo():
        yield from _lines(source, what, example)
    elif not source.is_file():
        yield from _numbered(f"{source}, record", _hub_dataset(source, what))
    elif source.suffix == ".jsonl":
        yield from _lines(source, what, example)
    elif source.suffix == ".json":
        yield from _json(source, what, example)
    elif source.suffix == ".parquet":
        yield from _numbered(f"{source}, row", _loaded("parquet", what, data_files=str(source), split="train"))
    else:
        kind = source.suffix or "plain text"
        raise ValueError(f"{what} {str(source)!r}: {kind} is not read, write .jsonl or .parquet")


def _lines(file: Path, what: str, example: str) -> Iterator[tuple[str, Record]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{file}, line {number}"
                    yield place, read_object(line, place, example)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(file)!r} is not UTF-8 text ({error.reason})") from None


def _json(file: Path, what: str, example: str) -> Iterator[tuple[str, Record]]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(file)!r} is not UTF-8 text ({error.reason})") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Many published `.json` files have a record in each line. Only those begin with a line that is whole.
        first = next((line for line in text.split("\n") if line.strip()), "")
        if not _is_json(first):
            raise ValueError(f"{what} {str(file)!r} is not JSON ({error})") from None
        yield from _lines(file, what, example)
        return
    for number, record in enumerate(_inside(found, f"{what} {str(file)!r}"), start=1):
        place = f"{file}, record {number}"
        yield place, checked_object(record, place, example)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _inside(found: object, file: str) -> list[object]:
    """The records of what a JSON file holds.

    >>> _inside({"version": 1, "data": [{"text": "a"}, {"text": "b"}]}, "the file")
    [{'text': 'a'}, {'text': 'b'}]
    >>> _inside({"messages": [{"role": "user", "content": "a"}]}, "the file")
    [{'messages': [{'role': 'user', 'content': 'a'}]}]

    Raises:
        ValueError: it is an object with several arrays that may be the records.
    """
    if isinstance(found, list):
        return found
    if not isinstance(found, dict) or found.keys() & RECORD_KEYS:
        return [found]
    arrays = [
        key
        for key, value in found.items()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    ]
    if len(arrays) > 1:
        raise ValueError(f"{file} has records under {', '.join(arrays)}: write those that you want as .jsonl")
    return list(found[arrays[0]]) if arrays else [found]


def content_digest(source: Path, what: str) -> str | None:
    """SHA-256 of what a source holds, as on this disk; None where it is held in memory alone.

    Args:
        source: as of `records`.
        what: what it is for, for complaints.

    Raises:
        ValueError: it does not exist or cannot be read.
    """
    if source.is_file():
        return file_digest(source)
    files = [Path(file["filename"]) for file in getattr(_hub_dataset(source, what), "cache_files", [])]
    return hashlib.sha256(" ".join(map(file_digest, files)).encode()).hexdigest() if files else None


def _hub_dataset(source: Path, what: str) -> Any:
    is_path = source.exists() or source.is_absolute()
    if is_path or source.suffix in {".jsonl", ".json", ".parquet", ".txt", ".md", ".py"}:
        raise ValueError(f"{what} {str(source)!r} does not exist, or is not a file")
    name, _, split = source.as_posix().partition(":")
    owner, *rest = name.split("/")
    path, configuration = "/".join([owner, *rest[:1]]), "/".join(rest[1:]) or None
    _check_hub(path, what)
    return _loaded(path, what, configuration, split=split or "train")


def _check_hub(path: str, what: str) -> None:
    # Asked once: `load_dataset` would try for half a minute where there is no network.
    from datasets.config import HF_DATASETS_CACHE

    if (Path(HF_DATASETS_CACHE) / path.replace("/", "___")).is_dir():
        return
    try:
        HfApi().dataset_info(path, timeout=10)
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{what} {path!r}: there is no such file and no such Hugging Face dataset") from None
    except (OSError, HTTPError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{what} {path!r}: there is no such file, and Hugging Face cannot be asked for it ({reason})"
        ) from None


def _numbered(name: str, rows: Any) -> Iterator[tuple[str, Record]]:
    for number, row in enumerate(rows, start=1):
        yield f"{name} {number}", {key: value for key, value in row.items() if value is not None}


def _loaded(path: str, what: str, configuration: str | None = None, **settings: str) -> Any:
    # Imported late: it takes seconds, and text and JSONL do not need it.
    from datasets import load_dataset

    try:
        return load_dataset(path, configuration, **settings)
    except Exception as error:  # datasets, pyarrow and the hub each raise their own kinds
        name = settings.get("data_files", path)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{what} {name!r} cannot be read: {reason}") from None

"""Reads records, to train on or to answer, from text, JSONL, JSON, Parquet and Hugging Face datasets."""

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


def read_object(text: str, location: str, example: str) -> dict[str, Any]:
    """Parses a JSON object whose texts can be tokenized, sent and written.

    Args:
        location: such as file and line, for error messages.

    Raises:
        ValueError: it is no JSON object, or contains a lone surrogate, NaN or infinity.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{location}: not JSON ({error})") from None
    return checked_object(value, location, example)


def checked_object(value: object, location: str, example: str) -> dict[str, Any]:
    """Checks that a value read from JSON is an object whose texts can be tokenized, sent and written, and returns it.

    Raises:
        ValueError: it is no object, or contains a lone surrogate, NaN or infinity.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{location}: expected a JSON object such as {example}")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{location}: not valid text ({error.reason})") from None
    except ValueError:
        raise ValueError(f"{location}: not JSON, which has no NaN and no infinity: write null") from None
    return value


def object_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row to a JSON object, the same in every run.

    Dates, durations, decimals and UUIDs become texts, bytes base64, NumPy arrays and scalars lists and numbers, and
    NaN and infinity null.

    Raises:
        ValueError: a value has another type, such as an image.

    Example:
        >>> object_of({"prompt": "a", "on": date(2026, 11, 21), "score": float("nan"), "raw": [b"ab"]})
        {'prompt': 'a', 'on': '2026-11-21', 'score': None, 'raw': ['YWI=']}
    """
    converted = {}
    for key, value in row.items():
        try:
            text = json.dumps(value, default=_in_json)
        except TypeError as error:
            raise ValueError(f"{key!r} cannot be written as JSON: {error}; name the columns that you want") from None
        converted[key] = json.loads(text, parse_constant=lambda _: None)
    return converted


def _in_json(value: object) -> object:
    """Encodes types that JSON lacks; raises for others, because their `str` may contain a memory address."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


COLUMNS = ("text", "prompt", "response", "messages", "user", "assistant", "finish_reason")
"""Names of a record's columns."""
SHARE_GPT = {"human": "user", "gpt": "assistant"}


def check_columns(columns: Mapping[str, object]) -> None:
    """Raises ValueError if `columns` does not map names in `COLUMNS` to names of the source."""
    for ours, theirs in columns.items():
        if ours not in COLUMNS:
            raise ValueError(f"columns: {ours!r} is none of {', '.join(COLUMNS)}")
        if not isinstance(theirs, str):
            raise ValueError(f"columns: {ours!r} is {theirs!r}: give the name that it has in the data")


def renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Keeps only the columns that `columns` names, renamed; the whole record if it names none.

    Raises:
        ValueError: a column is missing.
    """
    for theirs in columns.values():
        if theirs not in record:
            raise ValueError(f"there is no {theirs!r}, which `columns` names; there are {', '.join(record)}")
    return {ours: record[theirs] for ours, theirs in columns.items()} if columns else dict(record)


def conversation_of(record: Mapping[str, Any]) -> list[Message] | None:
    """Messages of a record, in any of the formats below; None if it has none.

    The formats: `messages`; ShareGPT's `conversations`; `conversation` of AMD's training data, one object per
    exchange; and a single exchange, `user` and `assistant`.

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
    """Whether this is a question with or without its answer in the format of AMD's training data."""
    return isinstance(turn, dict) and "human" in turn and turn.keys() <= {"human", "assistant"}


Record = dict[str, Any]
TABLES = {".jsonl", ".json", ".parquet"}
"""Suffixes of files with many records."""
NOT_TEXT = {*TABLES, ".ndjson", ".csv", ".tsv", ".arrow", ".gz", ".zst", ".zip", ".xz"}
"""Suffixes of files that are not plain text; includes `TABLES` to catch other spellings, such as `.JSON`."""
LOG_KEYS = {"tokens", "prompt_tokens", "begins", "rounds", "depths", "accepted"}
"""Keys of a line of `paradraft.decode.round_log`."""
RECORD_KEYS = {"text", "prompt", "response", "messages", "conversation", "conversations", "user", "assistant"}
"""Keys that tell a record from a JSON object that wraps a list of records."""


def records(source: Path, what: str) -> Iterator[tuple[str, Record]]:
    """Reads the records of a source for training.

    Args:
        source: as of `rows`; any other file is one text.
        what: purpose of the source, such as "training data", for error messages.

    Yields:
        Location of the record, for error messages, and the record.
    """
    if not source.is_file() or source.suffix in TABLES or source.suffix.lower() in NOT_TEXT:
        yield from rows(source, what, '{"text": "some text"}')
        return
    try:
        yield str(source), {"text": source.read_text(encoding="utf-8")}
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(source)!r} is not UTF-8 text ({error.reason})") from None


def rows(source: Path, what: str, example: str) -> Iterator[tuple[str, Record]]:
    """Reads the records of a source that is a table.

    Args:
        source: a `.jsonl`, `.json` or `.parquet` file, or a pipe of JSONL; otherwise a Hugging Face dataset:
            `name`, `name:split` (`train` by default) or `name/configuration:split`. A `.json` file holds an array of
            records, an object with one array of records in it, or a record in each line.
        what: purpose of the source, for error messages.

    Yields:
        Location of the record, for error messages, and the record.

    Raises:
        ValueError: the source does not exist, has another format or cannot be read, a record is no JSON object, or
            an object has several arrays that may be the records.
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
            for line_number, line in enumerate(lines, start=1):
                if line.strip():
                    location = f"{file}, line {line_number}"
                    yield location, read_object(line, location, example)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(file)!r} is not UTF-8 text ({error.reason})") from None


def _json(file: Path, what: str, example: str) -> Iterator[tuple[str, Record]]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {str(file)!r} is not UTF-8 text ({error.reason})") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Many published `.json` files are JSONL. Only in these the first line is valid JSON.
        first = next((line for line in text.split("\n") if line.strip()), "")
        if not _is_json(first):
            raise ValueError(f"{what} {str(file)!r} is not JSON ({error})") from None
        yield from _lines(file, what, example)
        return
    for index, record in enumerate(_records_in(content, f"{what} {str(file)!r}"), start=1):
        location = f"{file}, record {index}"
        yield location, checked_object(record, location, example)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _records_in(content: object, file: str) -> list[object]:
    """Records in the value of a JSON file.

    >>> _records_in({"version": 1, "data": [{"text": "a"}, {"text": "b"}]}, "the file")
    [{'text': 'a'}, {'text': 'b'}]
    >>> _records_in({"messages": [{"role": "user", "content": "a"}]}, "the file")
    [{'messages': [{'role': 'user', 'content': 'a'}]}]

    Raises:
        ValueError: it is an object with several arrays that may be the records.
    """
    if isinstance(content, list):
        return content
    if not isinstance(content, dict) or content.keys() & RECORD_KEYS or content.keys() >= LOG_KEYS:
        return [content]
    arrays = [
        key
        for key, value in content.items()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    ]
    if len(arrays) > 1:
        raise ValueError(f"{file} has records under {', '.join(arrays)}: write those that you want as .jsonl")
    return list(content[arrays[0]]) if arrays else [content]


def content_digest(source: Path, what: str) -> str | None:
    """SHA-256 of a source's files on this disk; None if it is in memory only.

    Raises:
        ValueError: the source does not exist or cannot be read.
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
    # One request: `load_dataset` would retry for half a minute without a network.
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
    for index, row in enumerate(rows, start=1):
        yield f"{name} {index}", {key: value for key, value in row.items() if value is not None}


def _loaded(path: str, what: str, configuration: str | None = None, **settings: str) -> Any:
    # Imported late: it takes seconds, and text and JSONL do not need it.
    from datasets import load_dataset

    try:
        return load_dataset(path, configuration, **settings)
    except Exception as error:  # datasets, pyarrow and the hub each raise their own kinds
        name = settings.get("data_files", path)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{what} {name!r} cannot be read: {reason}") from None

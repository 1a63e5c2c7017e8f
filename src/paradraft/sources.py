"""Where records come from, to train on or to be asked: text, JSONL, JSON, Parquet, Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from paradraft.json_object import checked_object, read_object
from paradraft.models.loading import HTTPError

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
        source: a `.jsonl`, `.json` or `.parquet` file; what is no file is a Hugging Face dataset: `name`, `name:split`
            (`train` by default) or `name/configuration:split`. A `.json` file holds an array of records, an object
            with one array of records in it, or a record in each line.
        what: what it is for, for complaints.
        example: a line of JSONL, for complaints.

    Yields:
        What to call the record in a complaint, and the record.

    Raises:
        ValueError: the source does not exist, is another file or cannot be read, a record is no JSON object, or an
            object has several arrays that may be the records.
    """
    if not source.is_file():
        yield from _dataset(source, what)
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
        first = next((line for line in text.splitlines() if line.strip()), "")
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


def _dataset(source: Path, what: str) -> Iterator[tuple[str, Record]]:
    is_path = source.exists() or source.is_absolute()
    if is_path or source.suffix in {".jsonl", ".json", ".parquet", ".txt", ".md", ".py"}:
        raise ValueError(f"{what} {str(source)!r} does not exist, or is not a file")
    name, _, split = source.as_posix().partition(":")
    owner, *rest = name.split("/")
    path, configuration = "/".join([owner, *rest[:1]]), "/".join(rest[1:]) or None
    _check_hub(path, what)
    yield from _numbered(f"{source}, record", _loaded(path, what, configuration, split=split or "train"))


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

"""Token cache: tokenizes large sources once, in parallel processes, and keeps the tokens on disk.

An entry is a dataset that `datasets` writes from a generator of rows (`token_table.py`). Its name is the digest of
everything that decides the tokens (`_identity`), and a manifest has the digests of its files, which every start checks,
because `datasets` does not. If several processes want the same entry, one tokenizes; the others wait and read its
result. Small sources are tokenized in the calling process, because starting processes takes longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from multiprocessing import connection, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from paradraft.data.tokens.token_table import TYPES, records_of, row_of
from paradraft.data.tokens.tokenized import Tokenization, Tokenized, tokenized
from paradraft.digests import file_digest
from paradraft.placement import usable_cpus
from paradraft.signals import sigterm_raises
from paradraft.sources.records import LOG_KEYS, RECORD_KEYS, Record, content_digest, records
from paradraft.text.chat_template import CLOCK

WHAT = "training data"
SMALL_BYTES = 2**22
"""Files up to this size are tokenized in less time than it takes to start processes."""
BATCH = 200
"""Records that a process tokenizes at a time."""
MANIFEST = "manifest.json"
CODE = ("data/chat.py", "data/samples.py", "data/tokens/token_table.py", "data/tokens/tokenized.py",
        "sources/records.py", "text/chat_template.py", "text/tokenization.py")  # fmt: skip
"""Source files of this package that decide the tokens."""
VERSIONS = ("paradraft", "transformers", "tokenizers", "jinja2")
Batch = list[tuple[str, Record | ValueError]]
_worker = threading.local()
"""The settings of a process that tokenizes: with each batch, they would be pickled anew."""


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Settings of the token cache.

    Args:
        folder: of the cache; None for one inside the cache of `datasets`.
        small_bytes: files up to this size are not cached.
    """

    folder: Path | None = None
    processes: int | None = None
    small_bytes: int = SMALL_BYTES


def tokenized_records(
    source: Path, how: Tokenization, cache: TokenCache, *, day: date | None = None
) -> Iterator[Tokenized]:
    """Tokenizes the records of a source, in their order, or reads their tokens from the cache.

    Warns if a cache entry is damaged or cannot be written.

    Raises:
        ValueError: the source does not exist or cannot be read, or the next record is broken.
    """
    is_small = source.is_file() and source.stat().st_size <= cache.small_bytes
    digest = None if is_small else content_digest(source, WHAT)
    if digest is None:
        yield from _plain(source, how)
        return
    folder = cache.folder or _default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        identity = _identity(source, digest, how, day)
        entry = folder / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        with FileLock(f"{entry}.lock"):
            table = _kept(entry, identity)
            if table is None:
                _make(entry, identity, source, how, cache.processes or usable_cpus())
                table = _table(entry)
    except OSError as error:
        warnings.warn(
            f"the tokens of {source} cannot be kept in {folder} ({error.strerror or error}), so every start makes them "
            "anew, in one process: set HF_DATASETS_CACHE to a folder with room",
            stacklevel=3,
        )
        yield from _plain(source, how)
        return
    yield from records_of(table)


def _plain(source: Path, how: Tokenization) -> Iterator[Tokenized]:
    for location, row in records(source, WHAT):
        yield tokenized(location, row, how)


def _default_folder() -> Path:
    from datasets.config import HF_DATASETS_CACHE  # imported late: it takes seconds

    return Path(HF_DATASETS_CACHE) / "paradraft--tokens"  # no name that a dataset may have


def _identity(source: Path, digest: str, how: Tokenization, day: date | None) -> dict[str, Any]:
    """Everything that decides the tokens of a source, and its name, which is part of error messages."""
    template, package = how.template, Path(__file__).parents[2]
    template_source = str(template.written or template.tokenizer.chat_template)
    identity = {
        "source": str(source),
        "sha256": digest,
        "tokenizer": _tokenizer_digest(template.tokenizer),
        "template": template.written or template.tokenizer.chat_template,
        "variables": dict(template.variables),
        "end_ids": sorted(template.end_ids),
        # A `day` is already rendered into the template, unless that calls the clock in an unknown form.
        "day": date.today().isoformat() if day is None or CLOCK in template_source else None,
        "columns": list(how.columns.items()),
        "max_length": how.max_length,
        "long": how.long,
        "versions": {name: version(name) for name in VERSIONS} | {"python": sys.version.split()[0]},
        "code": [file_digest(package / name) for name in CODE],
    }
    as_json: dict[str, Any] = json.loads(json.dumps(identity))
    return as_json


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    with TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # the Rust library raises nothing more specific if the disk is full
            raise OSError(f"its tokenizer cannot be written to {folder}: {error}") from None
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        lines = [type(tokenizer).__qualname__, *(f"{file.name} {file_digest(file)}" for file in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _kept(entry: Path, identity: dict[str, Any]) -> pa.Table | None:
    """Reads a cache entry; None if there is none. Deletes a damaged one, with a warning."""
    if not entry.exists():
        return None
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        if manifest["identity"] != identity:
            raise ValueError("of something else")
        for name, digest in manifest["files"].items():
            if file_digest(entry / name) != digest:
                raise ValueError(f"{name} is damaged")
        return _table(entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"the tokens kept in {entry} cannot be used ({error}): they are made anew", stacklevel=4)
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return None


def _table(entry: Path) -> pa.Table:
    """The memory-mapped rows of a cache entry."""
    names = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["files"]
    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(entry / name))).read_all() for name in names])


def _make(entry: Path, identity: dict[str, Any], source: Path, how: Tokenization, processes: int) -> None:
    """Tokenizes a source and writes the cache entry.

    Raises:
        ValueError: a record is broken, or a process died.
    """
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    unfinished = entry.with_name(f"{entry.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        with sigterm_raises():
            dataset = Dataset.from_generator(
                partial(_rows, source, how, processes),
                features=Features({name: Value(kind) for name, kind in TYPES.items()}),
                cache_dir=str(unfinished),
                split="tokens",
                fingerprint=entry.name,
            )
            files = [Path(file["filename"]) for file in dataset.cache_files]
            digests = {file.relative_to(unfinished).as_posix(): file_digest(file) for file in files}
            manifest = json.dumps({"identity": identity, "files": digests}, indent=1)
            (unfinished / MANIFEST).write_text(f"{manifest}\n", encoding="utf-8")
            unfinished.rename(entry)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rows(source: Path, how: Tokenization, processes: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a source in its order, tokenized in several processes.

    Raises:
        ValueError: the next record is broken, or a process died.
    """
    batches = _batches(source, how)
    first = list(islice(batches, processes))
    workers = len(first)
    if workers < 2:
        for batch in chain(first, batches):
            yield from _tokenized_batch(batch, how)
        return
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(how,))
    waiting: deque[tuple[Batch, Future[list[dict[str, Any]]]]] = deque()
    try:
        for batch in chain(first, batches):
            waiting.append((batch, pool.submit(_tokenized_batch, batch)))
            if len(waiting) > 2 * workers:
                yield from _result(*waiting.popleft(), how)
        while waiting:
            yield from _result(*waiting.popleft(), how)
    except BrokenExecutor as error:
        raise ValueError(
            f"{WHAT} {str(source)!r} cannot be tokenized in {workers} processes ({error}): free memory, or start on "
            "fewer CPUs, as with taskset"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(source: Path, how: Tokenization) -> Iterator[Batch]:
    """Yields records without unused values; the error at which reading ends takes the turn of a record."""
    used = set(how.columns.values()) or {*RECORD_KEYS, *LOG_KEYS, "finish_reason"}

    def readable() -> Iterator[tuple[str, Record | ValueError]]:
        try:
            for location, record in records(source, WHAT):
                yield location, {key: value if key in used else None for key, value in record.items()}
        except ValueError as error:
            yield "", error

    remaining = readable()
    while batch := list(islice(remaining, BATCH)):
        yield batch


def _result(batch: Batch, future: Future[list[dict[str, Any]]], how: Tokenization) -> list[dict[str, Any]]:
    try:
        return future.result()
    except RecursionError:  # a record is nested too deep to be sent to a process
        return _tokenized_batch(batch, how)


def _tokenized_batch(batch: Batch, how: Tokenization | None = None) -> list[dict[str, Any]]:
    rows = []
    for location, record in batch:
        if isinstance(record, ValueError):
            raise record
        try:
            rows.append(row_of(tokenized(location, record, how or _worker.how)))
        except RecursionError:
            raise ValueError(f"{location}: the record or the chat template is nested too deep") from None
    return rows


def _start_worker(how: Tokenization) -> None:
    _worker.how = how
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent receives it too
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a process whose parent was killed: it holds the locks of its parent."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

"""Token cache: tokenizes large sources once, in parallel processes, and keeps the tokens on disk.

The name of an entry is the digest of everything that decides the tokens (`_identity`). Entries are written atomically,
with the digests of their files, which every start checks. If several processes want the same entry, one tokenizes; the
others wait and read its result. Small sources are tokenized in the calling process, because starting processes takes
longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from paradraft.data.records import RECORD_KEYS, Record, content_digest, records
from paradraft.data.tokens.token_table import SCHEMA, read_table, records_of, table_of
from paradraft.data.tokens.tokenized import Tokenization, Tokenized, tokenized
from paradraft.digests import file_digest
from paradraft.signals import sigterm_raises
from paradraft.text.chat_template import CLOCK

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None  # type: ignore[assignment]

WHAT = "training data"
SMALL_BYTES = 2**22
"""Files up to this size are tokenized in less time than it takes to start processes."""
BATCH = 200
"""Records that a process tokenizes before it checks whether another process met a broken one."""
SHARE = 500
"""Fewest records per process."""
FIRST, FIRST_BYTES = 20, 2**16
"""The first `FIRST` records, up to `FIRST_BYTES` each, are tokenized while the records are read: most mistakes are in
all records, and are then reported at once."""
MANIFEST, RECORDS, TOKENS = "manifest.json", "records.arrow", "tokens.arrow"
CODE = ("data/chat.py", "data/records.py", "data/samples.py", "data/tokens/token_table.py", "data/tokens/tokenized.py",
        "text/chat_template.py", "text/tokenization.py")  # fmt: skip
"""Source files of this package that decide the tokens."""
VERSIONS = ("paradraft", "transformers", "tokenizers", "jinja2")
RAW = pa.schema([("place", pa.string()), ("record", pa.large_binary())])


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
    is_small = is_small or not _is_text(str(source))  # Arrow could not store the locations of its records
    digest = None if is_small else content_digest(source, WHAT)
    if digest is None:
        yield from _plain(source, how)
        return
    folder = cache.folder or _default_folder()
    mistake = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        identity = _identity(source, digest, how, day)
        entry = folder / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
        with _locked(entry.with_name(f"{entry.name}.lock")):
            table = _kept(entry, identity)
            if table is None:
                table, mistake = _make(entry, identity, source, how, cache.processes or _cpus())
    except OSError as error:
        warnings.warn(
            f"the tokens of {source} cannot be kept in {folder} ({error.strerror or error}), so every start makes them "
            "anew, in one process: set HF_DATASETS_CACHE to a folder with room",
            stacklevel=3,
        )
        yield from _plain(source, how)
        return
    yield from records_of(table)
    if mistake is not None:
        raise mistake


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(source: Path, how: Tokenization) -> Iterator[Tokenized]:
    for location, row in records(source, WHAT):
        yield tokenized(location, row, how)


def _default_folder() -> Path:
    from datasets.config import HF_DATASETS_CACHE  # imported late: it takes seconds

    return Path(HF_DATASETS_CACHE) / "paradraft--tokens"  # no name that a dataset may have


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    if fcntl is None:
        with FileLock(file):
            yield
        return
    # Not `flock`, which `FileLock` uses: the processes that `datasets` forks would hold it too, and their manager runs
    # for ever if its parent is killed.
    with file.open("w") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)
        yield


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
        return read_table(entry / name for name in manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"the tokens kept in {entry} cannot be used ({error}): they are made anew", stacklevel=4)
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return None


def _make(
    entry: Path, identity: dict[str, Any], source: Path, how: Tokenization, processes: int
) -> tuple[pa.Table, ValueError | None]:
    """Tokenizes a source in several processes and writes the cache entry.

    Returns:
        The tokens, and the error at which reading the source ended; then no entry is written.
    """
    unfinished = entry.with_name(f"{entry.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    try:
        with sigterm_raises():
            count, mistake = _write_records(unfinished / RECORDS, source, how)
            files = _tokenize(unfinished, source, how, max(min(processes, count // SHARE), 1)) if count else []
            (unfinished / RECORDS).unlink()
            if mistake is not None:
                return read_table(files), mistake
            manifest = {"identity": identity, "files": {file.name: file_digest(file) for file in files}}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            unfinished.rename(entry)
            return read_table(entry / file.name for file in files), None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_records(file: Path, source: Path, how: Tokenization) -> tuple[int, ValueError | None]:
    """Writes the records of a source for other processes to read.

    Returns:
        The count of records, and the error at which reading the source ended.

    Raises:
        ValueError: one of the first records is broken.
    """
    mistakes: list[ValueError] = []
    readable = _readable(source, how, mistakes)
    count = 0
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, RAW) as writer:
        while batch := list(islice(readable, BATCH)):
            pickles = [_pickled(location, record) for location, record in batch]
            for (location, record), pickled in islice(zip(batch, pickles, strict=True), max(FIRST - count, 0)):
                if len(pickled) <= FIRST_BYTES:
                    tokenized(location, record, how)
            count += len(batch)
            writer.write_batch(pa.record_batch([[location for location, _ in batch], pickles], schema=RAW))
    return count, mistakes[0] if mistakes else None


def _pickled(location: str, record: Record) -> bytes:
    try:
        return pickle.dumps(record)
    except RecursionError:
        raise ValueError(f"{location}: it is nested too deep to be read") from None


def _readable(source: Path, how: Tokenization, mistakes: list[ValueError]) -> Iterator[tuple[str, Record]]:
    """Yields records without unused values; appends the error at which reading ended to `mistakes`."""
    used = set(how.columns.values()) or {*RECORD_KEYS, "finish_reason"}
    try:
        for location, record in records(source, WHAT):
            yield location, {key: value if key in used else None for key, value in record.items()}
    except ValueError as error:
        mistakes.append(error)


def _tokenize(folder: Path, source: Path, how: Tokenization, processes: int) -> list[Path]:
    from datasets import Dataset, Features

    raw = Dataset.from_file(str(folder / RECORDS))
    tokenize = partial(_tokenized_batch, how=how, folder=folder, parent=os.getpid())
    try:
        tokens = raw.map(
            tokenize,
            batched=True,
            batch_size=BATCH,
            with_indices=True,
            num_proc=processes if processes > 1 else None,
            remove_columns=RAW.names,
            features=Features.from_arrow_schema(SCHEMA),
            cache_file_name=str(folder / TOKENS),
            load_from_cache_file=False,
            new_fingerprint=folder.stem,
            desc=f"tokenizing {source}",
        )
    except RecursionError:
        raise ValueError(f"{WHAT} {str(source)!r}: a record or the chat template is nested too deep") from None
    except RuntimeError as error:  # a process died
        raise ValueError(
            f"{WHAT} {str(source)!r} cannot be tokenized in {processes} processes ({error}): free memory, or start on "
            "fewer CPUs, as with taskset"
        ) from None
    return [Path(file["filename"]) for file in tokens.cache_files]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _tokenized_batch(
    batch: dict[str, list[Any]], indices: list[int], how: Tokenization, folder: Path, parent: int
) -> pa.Table:
    """Tokenizes a batch of records; ends at the first broken one that any process has met."""
    if not _is_running(parent):
        os._exit(1)  # it was killed, so the result is not needed
    broken = "broken-"
    if any(int(file.name.removeprefix(broken)) < indices[0] for file in folder.glob(f"{broken}*")):
        return SCHEMA.empty_table()
    done: list[Tokenized] = []
    for index, location, record in zip(indices, batch["place"], batch["record"], strict=True):
        try:
            done.append(tokenized(location, pickle.loads(record), how))
        except ValueError as error:
            (folder / f"{broken}{index}").touch()
            return table_of(done, str(error))
    return table_of(done)

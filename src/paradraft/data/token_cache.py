"""Tokenizes large sources once, in many processes, and keeps the tokens from start to start.

What is kept has a name made of all that decides it (`_identity`). It appears as a whole or not at all, with the digests
of its files, which every start checks. Of several processes that want the same one tokenizes, and the others wait for
it and read what it has written. Small sources are tokenized in the process that asks: other processes take longer to
begin.
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
from paradraft.data.token_table import SCHEMA, read_table, records_of, table_of
from paradraft.data.tokenized import Tokenization, Tokenized, tokenized
from paradraft.digests import file_digest
from paradraft.signals import sigterm_raises
from paradraft.text.chat_template import CLOCK

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None  # type: ignore[assignment]

WHAT = "training data"
SMALL_BYTES = 2**22
"""Of files up to this size the tokens are made in less time than it takes to start processes."""
BATCH = 200
"""Records that a process tokenizes before it looks whether another has found a broken one."""
SHARE = 500
"""Records that are worth a process."""
FIRST, FIRST_BYTES = 20, 2**16
"""So many records, if they are no larger, are tokenized while the records are read: most mistakes are in all records,
and are then said at once."""
MANIFEST, RECORDS, TOKENS = "manifest.json", "records.arrow", "tokens.arrow"
CODE = ("data/chat.py", "data/records.py", "data/samples.py", "data/token_table.py", "data/tokenized.py",
        "text/chat_template.py", "text/tokenization.py")  # fmt: skip
"""The files of this package that decide on tokens."""
VERSIONS = ("paradraft", "transformers", "tokenizers", "jinja2")
RAW = pa.schema([("place", pa.string()), ("record", pa.large_binary())])


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """Where tokens are kept, and how they are made.

    Args:
        folder: that holds them; None for one inside the cache of `datasets`.
        processes: that tokenize; None for one on each CPU.
        small_bytes: files up to this size are tokenized anew in every start.
    """

    folder: Path | None = None
    processes: int | None = None
    small_bytes: int = SMALL_BYTES


def tokenized_records(
    source: Path, how: Tokenization, cache: TokenCache, *, day: date | None = None
) -> Iterator[Tokenized]:
    """What becomes of the records of a source, in their order.

    Warns if tokens that were kept are damaged, and if new ones cannot be kept.

    Args:
        source: a file, or a Hugging Face dataset.
        how: what they become.
        cache: where they are kept.
        day: what the chat template takes for today; None for the day that it is.

    Raises:
        ValueError: the source does not exist or cannot be read, or the next record is broken.
    """
    is_small = source.is_file() and source.stat().st_size <= cache.small_bytes
    is_small = is_small or not _is_text(str(source))  # Arrow could not name its records
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
        with _alone(entry.with_name(f"{entry.name}.lock")):
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
    for place, row in records(source, WHAT):
        yield tokenized(place, row, how)


def _default_folder() -> Path:
    from datasets.config import HF_DATASETS_CACHE  # imported late: it takes seconds

    return Path(HF_DATASETS_CACHE) / "paradraft--tokens"  # no name that a dataset may have


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Waits until no other process is in here with the same file."""
    if fcntl is None:
        with FileLock(file):
            yield
        return
    # No `flock`, which `FileLock` takes: the processes that `datasets` forks would hold it too, and its manager goes on
    # for ever when the process that began it is killed.
    with file.open("w") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)
        yield


def _identity(source: Path, digest: str, how: Tokenization, day: date | None) -> dict[str, Any]:
    """All that decides on the tokens of a source; and its name, which complaints say."""
    template, package = how.template, Path(__file__).parent.parent
    written = str(template.written or template.tokenizer.chat_template)
    identity = {
        "source": str(source),
        "sha256": digest,
        "tokenizer": _tokenizer_digest(template.tokenizer),
        "template": template.written or template.tokenizer.chat_template,
        "variables": dict(template.variables),
        "end_ids": sorted(template.end_ids),
        # Where a day is given, the template has it already, unless it asks the clock in a way of its own.
        "day": date.today().isoformat() if day is None or CLOCK in written else None,
        "columns": list(how.columns.items()),
        "max_length": how.max_length,
        "long": how.long,
        "versions": {name: version(name) for name in VERSIONS} | {"python": sys.version.split()[0]},
        "code": [file_digest(package / name) for name in CODE],
    }
    read: dict[str, Any] = json.loads(json.dumps(identity))
    return read


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that a tokenizer writes when it is saved."""
    with TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # the library in Rust raises nothing else, where the disk is full
            raise OSError(f"its tokenizer cannot be written to {folder}: {error}") from None
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        told = [type(tokenizer).__qualname__, *(f"{file.name} {file_digest(file)}" for file in files)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _kept(entry: Path, identity: dict[str, Any]) -> pa.Table | None:
    """The tokens that are kept; None if there are none. Damaged ones are deleted, with a warning."""
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
    """Tokenizes a source in several processes and keeps the tokens.

    Returns:
        The tokens, and why the source cannot be read to its end; nothing is kept then.
    """
    unfinished = entry.with_name(f"{entry.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    try:
        with sigterm_raises():
            number, mistake = _write_records(unfinished / RECORDS, source, how)
            files = _tokenize(unfinished, source, how, max(min(processes, number // SHARE), 1)) if number else []
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
        How many there are, and why the source cannot be read to its end.

    Raises:
        ValueError: one of the first records is broken.
    """
    mistakes: list[ValueError] = []
    found = _readable(source, how, mistakes)
    number = 0
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, RAW) as writer:
        while some := list(islice(found, BATCH)):
            packed = [_packed(place, record) for place, record in some]
            for (place, record), written in islice(zip(some, packed, strict=True), max(FIRST - number, 0)):
                if len(written) <= FIRST_BYTES:
                    tokenized(place, record, how)
            number += len(some)
            writer.write_batch(pa.record_batch([[place for place, _ in some], packed], schema=RAW))
    return number, mistakes[0] if mistakes else None


def _packed(place: str, record: Record) -> bytes:
    try:
        return pickle.dumps(record)
    except RecursionError:
        raise ValueError(f"{place}: it is nested too deep to be read") from None


def _readable(source: Path, how: Tokenization, mistakes: list[ValueError]) -> Iterator[tuple[str, Record]]:
    """The records of a source, without what no sample is made of; `mistakes` gets why it cannot be read to its end."""
    used = set(how.columns.values()) or {*RECORD_KEYS, "finish_reason"}
    try:
        for place, record in records(source, WHAT):
            yield place, {key: value if key in used else None for key, value in record.items()}
    except ValueError as error:
        mistakes.append(error)


def _tokenize(folder: Path, source: Path, how: Tokenization, processes: int) -> list[Path]:
    """Writes the tokens of the records in a folder, and returns the files in their order.

    Raises:
        ValueError: a process has died.
    """
    from datasets import Dataset, Features

    read = Dataset.from_file(str(folder / RECORDS))
    tokenize = partial(_tokenized_batch, how=how, folder=folder, parent=os.getpid())
    try:
        made = read.map(
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
    except RuntimeError as error:  # a process has died
        raise ValueError(
            f"{WHAT} {str(source)!r} cannot be tokenized in {processes} processes ({error}): free memory, or start on "
            "fewer CPUs, as with taskset"
        ) from None
    return [Path(file["filename"]) for file in made.cache_files]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _tokenized_batch(
    batch: dict[str, list[Any]], indices: list[int], how: Tokenization, folder: Path, parent: int
) -> pa.Table:
    """Tokenizes some records, up to the first broken one in the source that any process has found."""
    if not _is_running(parent):
        os._exit(1)  # it was killed, and nobody waits
    broken = "broken-"
    if any(int(file.name.removeprefix(broken)) < indices[0] for file in folder.glob(f"{broken}*")):
        return SCHEMA.empty_table()
    found: list[Tokenized] = []
    for index, place, record in zip(indices, batch["place"], batch["record"], strict=True):
        try:
            found.append(tokenized(place, pickle.loads(record), how))
        except ValueError as error:
            (folder / f"{broken}{index}").touch()
            return table_of(found, str(error))
    return table_of(found)

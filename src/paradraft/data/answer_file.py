"""Append-only JSONL file of answers: complete lines only, each answer once, even if the run is killed.

The next run cuts off an incomplete last line and answers the missing questions. The settings that decide the text
are written to `<file>.settings.json` before the first answer; a run with other settings is refused. The lock
`<file>.lock` excludes a second run and ends with the process that holds it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from paradraft.data.questions import ID

SYNC_S = 1.0
"""Interval between two fsyncs: a power cut may lose the answers of this interval, a kill loses none."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Ids of the answers in a file, and size of its complete lines."""

    done: frozenset[str]
    size_bytes: int


@contextmanager
def only_writer(file: Path) -> Iterator[None]:
    """Excludes other runs that write a file.

    Raises:
        ValueError: another run writes it.
    """
    try:
        lock = FileLock(f"{file}.lock", blocking=False).acquire()
    except Timeout:
        raise ValueError(f"{file} is being written by another run: wait for it, or stop it") from None
    with lock:
        yield


class AnswerFile:
    """File of answers that only this process may append to inside the `with` block.

    Args:
        settings: the settings that decide the text, for JSON.
    """

    def __init__(self, file: Path, settings: Mapping[str, object], ids: Set[str]) -> None:
        self.file = file
        self.done: frozenset[str] = frozenset()
        """Ids of the answers that the file held on entering."""
        self._settings = settings
        self._ids = ids
        self._lock = ExitStack()
        self._synced_s = time.monotonic()
        self._stream: BinaryIO

    def __enter__(self) -> AnswerFile:
        """Locks the file and cuts off a torn last line.

        Raises:
            ValueError: another run has the lock, or as `read_answers`.
        """
        self._lock.enter_context(only_writer(self.file))
        try:
            contents = read_answers(self.file, self._settings, self._ids)
            self.done = contents.done
            if not contents.size_bytes:
                _write_settings(self.file, self._settings)
            self._stream = self.file.open("ab")
            self._stream.truncate(contents.size_bytes)
        except BaseException:
            self._lock.close()
            raise
        return self

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives a kill once this returns."""
        self._stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._stream.flush()
        if time.monotonic() - self._synced_s > SYNC_S:
            os.fsync(self._stream.fileno())
            self._synced_s = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Calls fsync and releases the lock."""
        try:
            with self._stream:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        finally:
            self._lock.close()


def read_answers(file: Path, settings: Mapping[str, object], ids: Set[str]) -> Contents:
    """Reads which answers a file, which need not exist, holds; changes nothing.

    Raises:
        ValueError: the file cannot be written, is not a file of answers, was written with other settings, or
            answers a question that this run does not have.
    """
    if not check_settings(file, settings):
        return Contents(done=frozenset(), size_bytes=0)
    done, size = set(), 0
    with file.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                answer_id = str(json.loads(line)[ID])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}, line {line_number} is not an answer of this command: remove it") from None
            if answer_id not in ids:
                raise ValueError(
                    f"{file}, line {line_number} answers what is not asked now: ask all that was asked before, or name "
                    "another --out"
                )
            done.add(answer_id)
            size += len(line)
    return Contents(done=frozenset(done), size_bytes=size)


def check_settings(file: Path, settings: Mapping[str, object]) -> bool:
    """Whether a file holds answers.

    Raises:
        ValueError: it cannot be written, is not a file of answers, or was written with other settings.
    """
    if (file.exists() and not file.is_file()) or not file.parent.is_dir():
        raise ValueError(f"{str(file)!r} cannot be written: it is no file, or in a folder that does not exist")
    if not file.exists() or not file.stat().st_size:
        return False
    _compare(file, _read_settings(file), settings)
    return True


def _settings_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.settings.json")


def _read_settings(file: Path) -> dict[str, object]:
    try:
        settings = json.loads(_settings_file(file).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{file} exists, but {_settings_file(file)} does not say how it was written: name another --out"
        )
    return settings


def _write_settings(file: Path, settings: Mapping[str, object]) -> None:
    # No rename is needed: this is read only once there are answers, and they come after it.
    with _settings_file(file).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _compare(file: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    now = json.loads(json.dumps(now))  # JSON knows no tuples
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{file} was written with {name}={before.get(name)!r}, and now it is {now.get(name)!r}: use the same "
                "settings, or name another --out"
            )

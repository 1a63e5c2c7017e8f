"""Which files of packed weights leave the user's cache before a new one is written.

Those whose model is no longer where it was, and those that no process has read for `MOST_DAYS`; then, the one that was
not read for longest first, as many as must go so that all together take at most `MOST_OF_DISK` of the disk and the new
one has room. A process that has mapped a file keeps its numbers: what is deleted stays on the disk until no process
has it mapped. Files of other names are never touched.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from paradraft.models.forward.cpu.build import is_private

MOST_DAYS = 30
MOST_OF_DISK = 0.25
LEAST_FREE = 2**30
"""Bytes of the disk that are left free."""
SOURCE = "source"
"""In a file's metadata: the folder or file of the model, or nothing where it has none."""
_NAME = re.compile(r"weights-[0-9a-f]{16}\.(safetensors|new)")
_DAY_S = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class _Other:
    path: Path
    size_bytes: int
    read_s: float


def mark_as_read(path: Path) -> None:
    """Notes that a file was read now: times of access are not kept on every disk."""
    with suppress(OSError):
        os.utime(path)


def make_room(new: Path, needed_bytes: int) -> None:
    """Deletes what is to leave the cache, where that can be done.

    Args:
        new: the file that is to be written; the one in its place stays until then.
        needed_bytes: of it.

    Raises:
        OSError: the cache cannot be read.
    """
    others = []
    for other in sorted(_others(new), key=lambda found: found.read_s):
        if time.time() - other.read_s > MOST_DAYS * _DAY_S or _is_of_nothing(other.path):
            _delete(other.path)
        else:
            others.append(other)
    disk = shutil.disk_usage(new.parent)
    most_bytes, kept_bytes = MOST_OF_DISK * disk.total - needed_bytes, sum(other.size_bytes for other in others)
    if disk.free + kept_bytes < needed_bytes + LEAST_FREE:
        return  # it would be in vain
    for other in others:
        if kept_bytes <= most_bytes and shutil.disk_usage(new.parent).free >= needed_bytes + LEAST_FREE:
            return
        _delete(other.path)
        kept_bytes -= other.size_bytes


def _others(new: Path) -> Iterator[_Other]:
    for path in new.parent.iterdir():
        if _NAME.fullmatch(path.name) and path.stem != new.stem and is_private(path):
            with suppress(OSError):  # another process has just deleted it
                status = path.lstat()
                yield _Other(path=path, size_bytes=status.st_size, read_s=status.st_mtime)


def _is_of_nothing(path: Path) -> bool:
    """Whether a file's model is gone, or it was begun by a process that has ended."""
    if path.suffix == ".new":
        return True  # what is still being written is locked, see `_delete`
    try:
        with safe_open(path, framework="pt") as opened:
            source = str((opened.metadata() or {}).get(SOURCE, ""))
    except (OSError, SafetensorError):
        return False  # it is made anew when it is wanted, or grows old
    return bool(source) and not os.path.exists(source)


def _delete(path: Path) -> None:
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), path.lstat()):  # not one that another process has just begun
            path.unlink()

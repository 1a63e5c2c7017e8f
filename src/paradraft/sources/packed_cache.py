"""Eviction of packed weight files from the user's cache before a new file is written.

Evicted are files whose model is gone, and files that no process has read for `MOST_DAYS`; then the least recently read,
until all files take at most `MOST_OF_DISK` of the disk and the new file fits. A process that has mapped a deleted file
keeps its data: the disk space is freed when no process maps it. Files with other names are never touched.
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
"""Bytes of the disk that stay free."""
SOURCE = "source"
"""Metadata key: the folder or file of the model; empty for a shape."""
_NAME = re.compile(r"weights-[0-9a-f]{16}\.(safetensors|new)")
_DAY_S = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class _CachedFile:
    path: Path
    size_bytes: int
    read_s: float


def mark_as_read(path: Path) -> None:
    """Sets a file's modification time to now, because not every disk keeps access times."""
    with suppress(OSError):
        os.utime(path)


def make_room(new: Path, needed_bytes: int) -> None:
    """Evicts files, but not an older version of `new`; only old and obsolete ones if `new` would not fit anyway.

    Raises:
        OSError: the cache cannot be read.
    """
    others = []
    for other in sorted(_cached_files(new), key=lambda file: file.read_s):
        if time.time() - other.read_s > MOST_DAYS * _DAY_S or _is_obsolete(other.path):
            _delete(other.path)
        else:
            others.append(other)
    disk = shutil.disk_usage(new.parent)
    most_bytes, kept_bytes = MOST_OF_DISK * disk.total - needed_bytes, sum(other.size_bytes for other in others)
    if disk.free + kept_bytes < needed_bytes + LEAST_FREE:
        return  # evicting all files would not make enough room
    for other in others:
        if kept_bytes <= most_bytes and shutil.disk_usage(new.parent).free >= needed_bytes + LEAST_FREE:
            return
        _delete(other.path)
        kept_bytes -= other.size_bytes


def _cached_files(new: Path) -> Iterator[_CachedFile]:
    for path in new.parent.iterdir():
        if _NAME.fullmatch(path.name) and path.stem != new.stem and is_private(path):
            with suppress(OSError):  # another process has just deleted it
                status = path.lstat()
                yield _CachedFile(path=path, size_bytes=status.st_size, read_s=status.st_mtime)


def _is_obsolete(path: Path) -> bool:
    """Whether a file's model is gone, or the file was left unfinished by a process that has ended."""
    if path.suffix == ".new":
        return True  # a file that is being written is locked, see `_delete`
    try:
        with safe_open(path, framework="pt") as opened:
            source = str((opened.metadata() or {}).get(SOURCE, ""))
    except (OSError, SafetensorError):
        return False  # it is rewritten at its model's next load, or evicted by age
    return bool(source) and not os.path.exists(source)


def _delete(path: Path) -> None:
    with suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), path.lstat()):  # not replaced by another process meanwhile
            path.unlink()

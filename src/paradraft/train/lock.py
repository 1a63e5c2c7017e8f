"""A lock on a folder: one run at a time writes into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, which need not exist.

    The lock is `<folder>.lock` beside it; the file stays, the lock goes with the process that holds it.

    Raises:
        ValueError: another run is in it.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use by another run: wait for it, or choose another `out`") from None
    try:
        yield
    finally:
        lock.release()

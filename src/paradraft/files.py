"""Result files: checked before the work, replaced atomically, synced to disk, with one-line errors for a full disk."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = {
    errno.ENOSPC: "no space is left on the disk: make room",
    errno.EFBIG: "the file system or ulimit -f takes no file of this size: choose another folder",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust, such as safetensors and tokenizers, report the errno."""
_TORCH_WORDS = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
"""Substrings of torch's messages: it writes through a C++ stream, which only reports that it could not write."""


def check_outputs(*files: Path | None) -> None:
    """Raises ValueError if a result file cannot be written, or if two results have the same file; None is skipped."""
    file_of: dict[str, Path] = {}
    for file in files:
        if file is None:
            continue
        if problem := _problem(file):
            raise ValueError(f"{str(file)!r} cannot be written: {problem}")
        real = os.path.realpath(file)
        if real in file_of:
            raise ValueError(f"{str(file_of[real])!r} and {str(file)!r} are one file: name two")
        file_of[real] = file


def write_output(file: Path, content: bytes) -> None:
    """Writes a file atomically. A symbolic link is followed; a pipe or a device is written to."""
    if _is_stream(file):
        file.write_bytes(content)
        return
    with temporary_beside(file) as new:
        new.write_bytes(content)
        os.replace(new, os.path.realpath(file))


def _problem(file: Path) -> str | None:
    folder = Path(os.path.realpath(file)).parent
    if file.is_dir():
        return "it is a folder, name a file in it"
    if file.exists() and not os.access(file, os.W_OK):
        return "there is no permission to change it"
    if _is_stream(file):
        return None
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}, make it first"
    try:
        # Tried, because a file system may refuse what permissions allow.
        with temporary_beside(file) as new:
            new.touch()
    except OSError as error:
        return f"its folder takes no new file ({error.strerror})"
    return None


def _is_stream(file: Path) -> bool:
    return file.exists() and not file.is_file()


@contextmanager
def temporary_beside(file: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder as `file`, and deletes it afterwards."""
    real = Path(os.path.realpath(file))
    new = real.with_name(f"{real.name}.{os.getpid()}.new")
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Calls fsync on a folder and everything in it."""
    for inside, _, files in os.walk(folder):
        for name in files:
            _sync_file(Path(inside, name))
        sync_entries(Path(inside))


def sync_entries(folder: Path) -> None:
    """Calls fsync on a folder: without it, a power cut after a rename brings the old name back."""
    if os.name == "posix":
        _sync_file(folder)


def _sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def one_line_when_full(path: Path, then: str) -> Iterator[None]:
    """Turns the errors that libraries raise on a full disk into one OSError that names the fix.

    Raises:
        OSError: no space is left, or a file is larger than the file system or a limit allows.
    """
    try:
        yield
    except Exception as error:
        if (code := _refusal(error)) is None:
            raise
        raise OSError(code, f"{_REFUSALS[code]}, and {then}", str(path)) from error


def _refusal(error: Exception) -> int | None:
    """The errno in `_REFUSALS` that caused an error; None for any other error."""
    code = error.errno if isinstance(error, OSError) else None
    if code is None and (match := _OS_ERROR.search(str(error))):
        code = int(match[1])
    if code in _FULL or (isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCH_WORDS)):
        return errno.ENOSPC
    return code if code in _REFUSALS else None

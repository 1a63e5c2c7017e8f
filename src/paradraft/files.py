"""Files of results: checked before the work, replaced only by whole new ones, kept when the power fails, and one line
where a disk takes no more."""

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
"""How libraries in Rust, safetensors and tokenizers among them, name what the system has answered."""
_TORCHS = ("inline_container.cc", "PytorchStreamWriter", "iostream error")
"""What is in the messages of torch, which writes through a C++ stream that only knows that it could not write."""


def check_outputs(*files: Path | None) -> None:
    """Raises ValueError if a result could not be written in the end, or two results were to have one file.

    Args:
        files: where results will go; None for a result that is not wanted.
    """
    found: dict[str, Path] = {}
    for file in files:
        if file is None:
            continue
        if problem := _problem(file):
            raise ValueError(f"{str(file)!r} cannot be written: {problem}")
        real = os.path.realpath(file)
        if real in found:
            raise ValueError(f"{str(found[real])!r} and {str(file)!r} are one file: name two")
        found[real] = file


def write_output(file: Path, content: bytes) -> None:
    """Writes a whole file. A link stays, and so does what is no file, such as a pipe: it gets the content."""
    if _is_stream(file):
        file.write_bytes(content)
        return
    with _beside(file) as new:
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
        # Tried, not asked: what permissions allow, a file system may refuse.
        with _beside(file) as new:
            new.touch()
    except OSError as error:
        return f"its folder takes no new file ({error.strerror})"
    return None


def _is_stream(file: Path) -> bool:
    return file.exists() and not file.is_file()


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """A name in the folder of the file itself, and nothing is left there."""
    real = Path(os.path.realpath(file))
    new = real.with_name(f"{real.name}.{os.getpid()}.new")
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Forces a folder, and all that is in it, from the system's memory to the disk."""
    for inside, _, files in os.walk(folder):
        for name in files:
            _sync_file(Path(inside, name))
        sync_entries(Path(inside))


def sync_entries(folder: Path) -> None:
    """Forces the names in a folder to the disk: after a rename, a power cut brings the old name back without it."""
    if os.name == "posix":
        _sync_file(folder)


def _sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def one_line_when_full(place: Path, then: str) -> Iterator[None]:
    """Turns what libraries raise where a disk takes no more into one OSError that says what to do.

    Args:
        place: what is written.
        then: what to do when there is room again.

    Raises:
        OSError: there is no room left, or a file is larger than the file system or a limit allows.
    """
    try:
        yield
    except Exception as error:
        if (number := _refusal(error)) is None:
            raise
        raise OSError(number, f"{_REFUSALS[number]}, and {then}", str(place)) from error


def _refusal(error: Exception) -> int | None:
    """The error number, one of `_REFUSALS`, by which a disk takes no more; None if the error is another one."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    if number in _FULL or (isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCHS)):
        return errno.ENOSPC
    return number if number in _REFUSALS else None

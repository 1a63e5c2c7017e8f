"""Builds the C++ beside this file for the CPU at hand, once; later processes find it on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = ("pass.cpp", "attention.h", "products.h", "team.h", "vectors.h")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
)
SECONDS = 300
"""How long the compiler may take; on a slow core it takes ten."""


class CannotBuildError(Exception):
    """There is no library for this machine, and why."""


def library() -> ctypes.CDLL:
    """The compiled passes.

    Raises:
        CannotBuildError: no compiler, or one that cannot do it.
    """
    found = _library()
    if isinstance(found, CannotBuildError):
        raise found
    return found


@functools.cache
def _library() -> ctypes.CDLL | CannotBuildError:
    """The library, or why there is none, so that a compiler that fails is asked once."""
    try:
        compiler = _compiler()
        file = _folder() / f"pass-{_key(compiler)}.so"
        if not file.exists():
            _build(compiler, file)
        try:
            # torch's own OpenMP is loaded already and has the same name, so that both share their threads.
            found = ctypes.CDLL(str(file))
        except OSError:  # damaged
            _build(compiler, file)
            found = ctypes.CDLL(str(file))
    except CannotBuildError as error:
        return error
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return CannotBuildError(str(error))
    found.packed_size.argtypes = [ctypes.c_int64] * 2
    found.packed_size.restype = ctypes.c_int64
    found.pack_matrix.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    found.multiply_all.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
    found.multiply_all.restype = ctypes.c_int64
    found.new_scratch.restype = ctypes.c_void_p
    found.delete_scratch.argtypes = [ctypes.c_void_p]
    found.forward.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    found.forward.restype = ctypes.c_int64
    return found


def _compiler() -> list[str]:
    """The command of the compiler, with what `CXX` says behind it."""
    wanted = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"], ["c++"]]
    for command in wanted:
        if command and shutil.which(command[0]):
            return command
    raise CannotBuildError(f"there is no C++ compiler ({', '.join(map(' '.join, wanted))})")


def _folder() -> Path:
    """Where the library is kept: a folder that nobody else can write into, since it is run."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paradraft"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    folder = Path(tempfile.gettempdir()) / f"paradraft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CannotBuildError(f"{folder} is not a folder of yours alone: set XDG_CACHE_HOME")
    return folder


def _key(compiler: list[str]) -> str:
    """What decides how the library comes out: the sources, the compiler and the CPU's instructions."""
    found = hashlib.sha256()
    for name in SOURCES:
        found.update((Path(__file__).parent / name).read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    instructions = next((line for line in _cpu() if line.startswith(("flags", "Features"))), platform.machine())
    found.update(repr((FLAGS, compiler, version, instructions)).encode())
    return found.hexdigest()[:16]


def _cpu() -> list[str]:
    """What Linux says of the first CPU and the others."""
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _build(compiler: list[str], file: Path) -> None:
    """Compiles beside the file and moves it there, so that two processes at once do no harm."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *FLAGS, str(Path(__file__).parent / SOURCES[0]), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            raise CannotBuildError((done.stderr.strip().splitlines() or [f"{compiler[0]} failed"])[0])
        os.replace(made, file)

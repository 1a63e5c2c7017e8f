"""Builds the C++ beside this file for the CPU at hand, once; later processes find it on disk.

What is found on disk is run, so it is only taken from a folder that no other user can write into. It must be whole:
to load a library that is cut off can end the process. A digest at the end of the file says that it is whole, and what
it was built from.

A wheel of `make wheel` brings libraries for common CPUs (prebuilt.py), of which one is loaded where it fits.
"""

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
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from paradraft.models.forward.cpu.prebuilt import FOLDER, LEVELS, level_of

NATIVE = Path(__file__).parent / "native"
SOURCES = (
    "forward.cpp", "integers.cpp", "packing.cpp", "correction.cpp", "tree.cpp", "draw.cpp",
    "attention.h", "gemm.h", "integers.h", "team.h", "tiles.h", "simd.h",
)  # fmt: skip
FOR_ANY_CPU = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC")
FLAGS = (
    *FOR_ANY_CPU,
    "-mcpu=native" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "-march=native",
)
SECONDS = 300
"""How long the compiler may take; on a slow core it takes ten."""
DIGEST_BYTES = 32
"""Of the digest at the end of a library's file."""


def openmp_flags() -> list[tuple[str, ...]]:
    """What asks a compiler for OpenMP, in the order in which it is tried; the last does without.

    Apple's clang has OpenMP and neither its option nor its library: torch brings that one. Without it weights are
    packed by one thread, once; passes have threads of their own.
    """
    torchs = Path(torch.__file__).parent / "lib" / "libomp.dylib"
    apples = [("-Xpreprocessor", "-fopenmp", str(torchs))] if torchs.is_file() else []
    return [("-fopenmp",), *apples, ("-Wno-unknown-pragmas",)]


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


def is_built() -> bool:
    """Whether there is a library; it is built if it can be."""
    return not isinstance(_library(), CannotBuildError)


def kernel_names() -> list[str]:
    """The instructions that products on this machine's CPU use, such as "avx512" and "vnni"; none without a library."""
    found = _library()
    return [] if isinstance(found, CannotBuildError) else found.kernel_names().decode().split()


@functools.cache
def _library() -> ctypes.CDLL | CannotBuildError:
    """The library, or why there is none, so that a compiler that fails is asked once."""
    try:
        found = _load()
    except CannotBuildError as error:
        return error
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return CannotBuildError(str(error))
    found.kernel_names.restype = ctypes.c_char_p
    found.packed_bytes.argtypes = [ctypes.c_void_p]
    found.packed_bytes.restype = ctypes.c_int64
    for pack in (found.pack_matrix, found.pack_integers):
        pack.argtypes = [ctypes.c_void_p] * 3
        pack.restype = None
    found.unpack_integers.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    found.unpack_integers.restype = None
    found.copy_outputs.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
    found.copy_outputs.restype = None
    found.multiply_all.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
    found.multiply_all.restype = ctypes.c_int64
    found.set_openmp_threads.argtypes = [ctypes.c_int]
    found.set_openmp_threads.restype = ctypes.c_int
    found.new_scratch.restype = ctypes.c_void_p
    found.delete_scratch.argtypes = [ctypes.c_void_p]
    found.forward.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    found.forward.restype = ctypes.c_int64
    found.grow_trees.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_double, *[ctypes.c_void_p] * 3]
    found.grow_trees.restype = ctypes.c_int64
    found.draw_chains.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    found.draw_chains.restype = None
    found.grow_corrected.argtypes = [
        *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int64
    ]  # fmt: skip
    found.grow_corrected.restype = None
    found.draw_tokens.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p,
        ctypes.c_int64,
    ]  # fmt: skip
    found.draw_tokens.restype = ctypes.c_int64
    found.compact_paths.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2
    ]  # fmt: skip
    found.compact_paths.restype = ctypes.c_int64
    return found


def _load() -> ctypes.CDLL:
    """Loads the wheel's library, or that of the first folder that has one, and builds it where none has."""
    if (shipped := _shipped()) is not None:
        return shipped[0]
    key = library_key()
    for folder in _folders():
        file = folder / f"pass-{key}.so"
        if is_private(folder, is_folder=True) and _is_whole(file, key):
            try:
                # torch's own OpenMP is loaded already and has the same name, so that both share their threads.
                return ctypes.CDLL(str(file))
            except OSError:  # nothing may be run there, or it was built on a system with other libraries
                continue
    content = b""
    problem: Exception = CannotBuildError("no folder for it is yours alone: set XDG_CACHE_HOME to one that is")
    for folder in (each for each in _folders() if is_made(each, "the compiled library is")):
        content = content or _compiled([*_compiler(), *FLAGS])
        file = folder / f"pass-{key}.so"
        try:
            _write(file, content + _digest(content, key))
            return ctypes.CDLL(str(file))
        except OSError as error:  # the disk is full or read-only, or nothing may be run there
            problem = error
    raise problem


@functools.cache
def _shipped() -> tuple[ctypes.CDLL, str] | None:
    """The library that the wheel brings for this CPU, with its key; None where it brings none that can be loaded.

    Whoever can write into the installation can change its Python too, so only what is damaged is refused.
    """
    level = level_of(platform.machine(), instructions())
    if level is None or not FOLDER.is_dir():
        return None
    file, key = FOLDER / level.file, _key(level.flags)
    try:
        if _has_digest(file, key):
            return ctypes.CDLL(str(file)), key
        problem = "it is damaged or of other sources"
    except OSError as error:
        problem = str(error)
    warnings.warn(
        f"{file} came with this installation and cannot be used ({problem}): install the wheel again; until then the "
        "library is compiled on this machine",
        stacklevel=2,
    )
    return None


def build_for_wheel(folder: Path) -> None:
    """Compiles the libraries that a wheel brings, for CPUs that this machine's need not be.

    Args:
        folder: for their files, which is made if it is not there.

    Raises:
        CannotBuildError: no compiler, or one that cannot do it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        content = _compiled([*_compiler(), *FOR_ANY_CPU, *level.flags])
        _write(folder / level.file, content + _digest(content, _key(level.flags)))


def _compiler() -> list[str]:
    """The command of the compiler, with what `CXX` says after it."""
    wanted = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"], ["c++"]]
    for command in wanted:
        if command and shutil.which(command[0]):
            return command
    raise CannotBuildError(f"there is no C++ compiler ({', '.join(map(' '.join, wanted))})")


def _folders() -> list[Path]:
    """Where the library may be kept: in the user's cache, else in a folder of its own among the temporary files."""
    temporary = Path(tempfile.gettempdir()) / f"paradraft-{os.geteuid()}"
    return [temporary] if (cache := cache_folder()) is None else [cache, temporary]


def cache_folder() -> Path | None:
    """Our folder in the user's cache, which may not be there yet; None where there is no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"  # the standard wants others ignored
    except RuntimeError:
        return None
    # The user may have moved the cache and left a link to it. Among the temporary files a link may be any user's.
    return Path(os.path.realpath(cache / "paradraft"))


def is_made(folder: Path, kept: str) -> bool:
    """Makes a folder if it is not there, and says whether no other user can write into it.

    Args:
        folder: in the user's cache or among the temporary files.
        kept: what is to be kept there, with "is" or "are", for the warning.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # of a system where no user may write
        return False
    if is_private(folder, is_folder=True):
        return True
    warnings.warn(
        f"{kept} not kept in {folder}, which others can write into or which is not yours: make it a "
        "folder of yours alone (chmod 700), or set XDG_CACHE_HOME",
        stacklevel=2,
    )
    return False


def is_private(place: Path, *, is_folder: bool = False) -> bool:
    """Whether a file or folder is no link, belongs to this user or to root, and no other user can write into it."""
    try:
        status = place.lstat()
    except OSError:
        return False
    is_kind = stat.S_ISDIR if is_folder else stat.S_ISREG
    return is_kind(status.st_mode) and status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _is_whole(file: Path, key: str) -> bool:
    """Whether a file is a library that was built for this key, and nothing of it is missing."""
    try:
        return is_private(file) and _has_digest(file, key)
    except OSError:
        return False


def _has_digest(file: Path, key: str) -> bool:
    content = file.read_bytes()
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES], key)


def _digest(library: bytes, key: str) -> bytes:
    """What stands at the end of a library's file, where the loader does not look."""
    return hashlib.sha256(key.encode() + library).digest()


def library_key() -> str:
    """What decides how the library comes out, and in which order it reads weights: the sources and the CPU's
    instructions, and which compiler is asked for; or the sources and the options of the wheel's library.

    Not the compiler's version: then a machine without one could not use what it has. So a library is kept when the
    compiler is renewed.
    """
    if (shipped := _shipped()) is not None:
        return shipped[1]
    return _key((FLAGS, os.environ.get("CXX", ""), platform.machine(), instructions()))


def _key(choices: object) -> str:
    found = hashlib.sha256()
    for name in SOURCES:
        found.update((NATIVE / name).read_bytes())
    found.update(repr(choices).encode())
    return found.hexdigest()[:16]


def instructions() -> str:
    """Which instructions the CPU has, as Linux says it."""
    return next((line for line in _cpu() if line.startswith(("flags", "Features"))), "")


def _cpu() -> list[str]:
    """What Linux says of the first CPU and the others."""
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _compiled(command: list[str]) -> bytes:
    """The library as the compiler makes it, whose command and options these are."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "pass.so"
        complaints: list[str] = []
        for openmp in openmp_flags():
            if problem := _build([*command, *openmp], made):
                complaints.append(problem)
            else:
                return made.read_bytes()
        raise CannotBuildError(complaints[0])


def _build(command: list[str], to: Path) -> str | None:
    """Compiles the sources, several at a time, and links them; returns what the compiler complains of, if it fails."""
    sources = [NATIVE / name for name in SOURCES if name.endswith(".cpp")]
    objects = [to.with_name(f"{source.stem}.o") for source in sources]
    commands = [[*command, "-c", str(file), "-o", str(made)] for file, made in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        problems = [*threads.map(_problem, commands)]
    return next(filter(None, problems), None) or _problem([*command, "-shared", *map(str, objects), "-o", str(to)])


def _problem(command: list[str]) -> str | None:
    """The first line of what a command complains of, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else f"{command[0]} failed")


def _write(file: Path, content: bytes) -> None:
    """Writes a file of this user's alone.

    It takes its place when it is whole and on the disk, so that neither processes that build at the same time nor a
    loss of power leave a part of it.
    """
    descriptor, new = tempfile.mkstemp(dir=file.parent)
    try:
        with open(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
        os.replace(new, file)
    except BaseException:
        os.unlink(new)
        raise
    with suppress(OSError):  # not every file system can do that for a folder
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

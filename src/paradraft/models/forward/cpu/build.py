"""Compiles the C++ of `native/` for this CPU, once; later processes load the library from the user's cache.

Because the library is executed, it is loaded only from a folder that no other user can write into. A digest at its end
covers content and sources, because loading a truncated library can end the process.

A wheel of `make wheel` has prebuilt libraries for common CPUs (prebuilt.py), which are preferred.
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
SOURCES = tuple(sorted(file.name for file in NATIVE.iterdir() if file.suffix in (".cpp", ".h")))
FOR_ANY_CPU = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC")
FLAGS = (
    *FOR_ANY_CPU,
    "-mcpu=native" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "-march=native",
)
SECONDS = 300
"""Time limit of the compiler, which takes ten seconds on a slow core."""
DIGEST_BYTES = 32
"""Size of the digest at the end of a library's file."""


def openmp_flags() -> list[tuple[str, ...]]:
    """Compiler options for OpenMP, in the order in which they are tried; the last does without OpenMP.

    Apple's clang has OpenMP, but neither the option nor the library, which is torch's. Without OpenMP weights are
    packed by one thread, once; passes have their own threads.
    """
    torchs = Path(torch.__file__).parent / "lib" / "libomp.dylib"
    apples = [("-Xpreprocessor", "-fopenmp", str(torchs))] if torchs.is_file() else []
    return [("-fopenmp",), *apples, ("-Wno-unknown-pragmas",)]


class CannotBuildError(Exception):
    """There is no library for this machine; the message is the reason."""


def library() -> ctypes.CDLL:
    """The compiled library, built if necessary; raises CannotBuildError without a compiler, or if it fails."""
    native = _library()
    if isinstance(native, CannotBuildError):
        raise native
    return native


def is_built() -> bool:
    """Whether there is a library; builds it if necessary."""
    return not isinstance(_library(), CannotBuildError)


def kernel_names() -> list[str]:
    """The CPU instructions that products use, such as "avx512" and "vnni"; empty without a library."""
    native = _library()
    return [] if isinstance(native, CannotBuildError) else native.kernel_names().decode().split()


@functools.cache
def _library() -> ctypes.CDLL | CannotBuildError:
    """The library, or the error, so that a failing compiler runs once."""
    try:
        native = _load()
    except CannotBuildError as error:
        return error
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return CannotBuildError(str(error))
    native.kernel_names.restype = ctypes.c_char_p
    native.packed_bytes.argtypes = [ctypes.c_void_p]
    native.packed_bytes.restype = ctypes.c_int64
    for pack in (native.pack_matrix, native.pack_integers):
        pack.argtypes = [ctypes.c_void_p] * 3
        pack.restype = None
    native.unpack_integers.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    native.unpack_integers.restype = None
    native.copy_outputs.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
    native.copy_outputs.restype = None
    native.multiply_all.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
    native.multiply_all.restype = ctypes.c_int64
    native.set_openmp_threads.argtypes = [ctypes.c_int]
    native.set_openmp_threads.restype = ctypes.c_int
    native.new_scratch.restype = ctypes.c_void_p
    native.delete_scratch.argtypes = [ctypes.c_void_p]
    native.forward.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    native.forward.restype = ctypes.c_int64
    native.grow_trees.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_double, *[ctypes.c_void_p] * 3]
    native.grow_trees.restype = ctypes.c_int64
    native.draw_chains.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    native.draw_chains.restype = None
    native.grow_corrected.argtypes = [
        *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int64
    ]  # fmt: skip
    native.grow_corrected.restype = None
    native.select_chains.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64]
    native.select_chains.restype = None
    native.grow_selected.argtypes = [*[ctypes.c_void_p] * 2, *native.grow_corrected.argtypes]
    native.grow_selected.restype = None
    native.draw_tokens.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p,
        ctypes.c_int64,
    ]  # fmt: skip
    native.draw_tokens.restype = ctypes.c_int64
    native.largest_probabilities.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64
    ]  # fmt: skip
    native.largest_probabilities.restype = None
    native.likeliest_tokens.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2,
        ctypes.c_int64,
    ]  # fmt: skip
    native.likeliest_tokens.restype = None
    native.compact_paths.argtypes = [
        ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2
    ]  # fmt: skip
    native.compact_paths.restype = ctypes.c_int64
    return native


def _load() -> ctypes.CDLL:
    """Loads the wheel's library or that of the first folder with one, else builds it."""
    if (shipped := _shipped()) is not None:
        return shipped[0]
    key = library_key()
    for folder in _folders():
        file = folder / f"pass-{key}.so"
        if is_private(folder, is_folder=True) and _is_whole(file, key):
            try:
                # torch's own OpenMP is loaded already and has the same name, so that both share their threads.
                return ctypes.CDLL(str(file))
            except OSError:  # a noexec file system, or the library was built on a system with other libraries
                continue
    content = b""
    problem: Exception = CannotBuildError("no folder for it is yours alone: set XDG_CACHE_HOME to one that is")
    for folder in (each for each in _folders() if is_made(each, "the compiled library is")):
        content = content or _compiled([*_compiler(), *FLAGS])
        file = folder / f"pass-{key}.so"
        try:
            _write(file, content + _digest(content, key))
            return ctypes.CDLL(str(file))
        except OSError as error:  # the disk is full or read-only, or a noexec file system
            problem = error
    raise problem


@functools.cache
def _shipped() -> tuple[ctypes.CDLL, str] | None:
    """The wheel's library for this CPU, with its key; None if there is none that can be loaded.

    Its folder's permissions are not checked, because who can write there can change the Python code too.
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
    """Compiles the prebuilt libraries of a wheel into a folder; this machine's CPU need not run them."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS:
        content = _compiled([*_compiler(), *FOR_ANY_CPU, *level.flags])
        _write(folder / level.file, content + _digest(content, _key(level.flags)))


def _compiler() -> list[str]:
    """The command of the compiler: `CXX` with its options, or the first one installed."""
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    raise CannotBuildError(f"there is no C++ compiler ({', '.join(map(' '.join, candidates))})")


def _folders() -> list[Path]:
    """Folders for the library: in the user's cache, else in the temporary folder."""
    temporary = Path(tempfile.gettempdir()) / f"paradraft-{os.geteuid()}"
    return [temporary] if (cache := cache_folder()) is None else [cache, temporary]


def cache_folder() -> Path | None:
    """Our folder in the user's cache, which may not exist yet; None without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"  # the standard ignores relative paths
    except RuntimeError:
        return None
    # The user may have moved the cache and left a link to it. In the temporary folder a link may be any user's.
    return Path(os.path.realpath(cache / "paradraft"))


def is_made(folder: Path, kept: str) -> bool:
    """Makes a folder if necessary, and returns whether no other user can write into it.

    `kept` is the subject of the warning, with "is" or "are".
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # users may not write there
        return False
    if is_private(folder, is_folder=True):
        return True
    warnings.warn(
        f"{kept} not kept in {folder}, which others can write into or which is not yours: make it a "
        "folder of yours alone (chmod 700), or set XDG_CACHE_HOME",
        stacklevel=2,
    )
    return False


def is_private(path: Path, *, is_folder: bool = False) -> bool:
    """Whether a file or folder is no link, belongs to this user or root, and no other user can write into it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_kind = stat.S_ISDIR if is_folder else stat.S_ISREG
    return is_kind(status.st_mode) and status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _is_whole(file: Path, key: str) -> bool:
    """Whether a file is a complete library for this key."""
    try:
        return is_private(file) and _has_digest(file, key)
    except OSError:
        return False


def _has_digest(file: Path, key: str) -> bool:
    content = file.read_bytes()
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES], key)


def _digest(library: bytes, key: str) -> bytes:
    """The digest at the end of a library's file, which the loader ignores."""
    return hashlib.sha256(key.encode() + library).digest()


def library_key() -> str:
    """A key of all that the library, and its order of packed weights, depends on: sources, `CXX` and CPU instructions;
    for the wheel's library sources and options.

    Not of the compiler's version, because then a machine without a compiler could not use its library. So a library
    outlives an update of the compiler.
    """
    if (shipped := _shipped()) is not None:
        return shipped[1]
    return _key((FLAGS, os.environ.get("CXX", ""), platform.machine(), instructions()))


def _key(choices: object) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((NATIVE / name).read_bytes())
    digest.update(repr(choices).encode())
    return digest.hexdigest()[:16]


def instructions() -> str:
    """The CPU's instructions: the line of `/proc/cpuinfo`; empty without one."""
    return next((line for line in _cpu() if line.startswith(("flags", "Features"))), "")


def _cpu() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _compiled(command: list[str]) -> bytes:
    """Compiles the library; returns its content."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pass.so"
        problems: list[str] = []
        for openmp in openmp_flags():
            if problem := _build([*command, *openmp], file):
                problems.append(problem)
            else:
                return file.read_bytes()
        raise CannotBuildError(problems[0])


def _build(command: list[str], to: Path) -> str | None:
    """Compiles the sources in parallel and links them; returns the compiler's error, if it fails."""
    sources = [NATIVE / name for name in SOURCES if name.endswith(".cpp")]
    objects = [to.with_name(f"{source.stem}.o") for source in sources]
    commands = [[*command, "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        problems = [*threads.map(_problem, commands)]
    return next(filter(None, problems), None) or _problem([*command, "-shared", *map(str, objects), "-o", str(to)])


def _problem(command: list[str]) -> str | None:
    """The first line of a command's error, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else f"{command[0]} failed")


def _write(file: Path, content: bytes) -> None:
    """Writes a file of this user alone, atomically: neither concurrent builds nor a power loss leave a part of it."""
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
    with suppress(OSError):  # not every file system supports that for a folder
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

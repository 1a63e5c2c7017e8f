"""Builds the C++ beside this file for the CPU at hand, once; later processes find it on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = ("pass.cpp", "attention.h", "products.h", "vectors.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SECONDS = 300
"""How long the compiler may take; on a slow core it takes ten."""


class CannotBuildError(Exception):
    """There is no library for this machine, and why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled passes.

    Raises:
        CannotBuildError: no compiler, or one that cannot do it.
    """
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    compiler = next((there for name in wanted if (there := shutil.which(name))), None)
    if compiler is None:
        raise CannotBuildError(f"there is no C++ compiler ({', '.join(wanted)})")
    file = _folder() / f"pass-{_key(compiler)}.so"
    try:
        if not file.exists():
            _build(compiler, file)
        # torch's own OpenMP is loaded already and has the same name, so that both share their threads.
        found = ctypes.CDLL(str(file))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(str(error)) from None
    found.packed_size.argtypes = [ctypes.c_int64] * 2
    found.packed_size.restype = ctypes.c_int64
    found.pack_matrix.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    found.multiply_all.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    found.new_scratch.restype = ctypes.c_void_p
    found.delete_scratch.argtypes = [ctypes.c_void_p]
    found.forward.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    return found


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paradraft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"paradraft-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _key(compiler: str) -> str:
    """What decides how the library comes out: the sources, the compiler and the CPU's instructions."""
    found = hashlib.sha256()
    for name in SOURCES:
        found.update((Path(__file__).parent / name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    found.update(repr((FLAGS, version, sorted(torch.cpu.get_capabilities().items()))).encode())
    return found.hexdigest()[:16]


def _build(compiler: str, file: Path) -> None:
    """Compiles beside the file and moves it there, so that two processes at once do no harm."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [compiler, *FLAGS, str(Path(__file__).parent / SOURCES[0]), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        if done.returncode:
            raise CannotBuildError((done.stderr.strip().splitlines() or [f"{compiler} failed"])[0])
        os.replace(made, file)

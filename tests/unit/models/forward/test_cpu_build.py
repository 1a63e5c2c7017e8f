"""The library in C++: built once, kept where it is safe, and not missed where it cannot be had."""

from __future__ import annotations

import _ctypes
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.compiled import CompiledPass
from paradraft.models.forward.cpu import build
from paradraft.models.forward.cpu.matrix import Matrix
from paradraft.models.forward.cpu.model import NativePass
from tests.support.random_models import random_model


@pytest.fixture(scope="module")
def compiled() -> bytes:
    """What the compiler makes, from the cache where it is there: it takes ten seconds."""
    build._library.cache_clear()
    build.library()
    name = f"pass-{build.library_key()}.so"
    (file, *_) = (folder / name for folder in build._folders() if build._is_whole(folder / name, build.library_key()))
    return file.read_bytes()[: -build.DIGEST_BYTES]


@pytest.fixture
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where nothing has been built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    build._library.cache_clear()
    yield tmp_path / "cache" / "paradraft"
    build._library.cache_clear()


@pytest.fixture
def builds(compiled: bytes, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A compiler that takes no time, and the commands it was called with."""
    called: list[list[str]] = []

    def compile_at_once(command: list[str]) -> bytes:
        called.append(command)
        return compiled

    monkeypatch.setattr(build, "_compiled", compile_at_once)
    return called


def load_again() -> None:
    """Looks for the library as a new process does, and checks that it can be called."""
    build._library.cache_clear()
    build._shipped.cache_clear()
    assert build.library().packed_bytes(ctypes.byref(Matrix(outputs=1, inputs=2, kind=0)))


def test_kernels_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards figures that cannot be compared because other instructions were behind them."""
    has = torch.cpu.get_capabilities()
    assert ("avx512" in build.kernel_names()) == has.get("avx512_f", has.get("avx512", False))
    monkeypatch.setattr(build, "_library", lambda: build.CannotBuildError("no compiler"))
    assert build.kernel_names() == []


def test_it_is_built_once(new_machine: Path, builds: list[list[str]]) -> None:
    """Guards ten seconds of every process."""
    load_again()
    (file,) = new_machine.iterdir()
    content = file.read_bytes()
    load_again()
    assert list(new_machine.iterdir()) == [file] and file.read_bytes() == content
    assert len(builds) == 1


def test_it_serves_without_a_compiler(
    new_machine: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards machines on which it was built once, such as images of containers: the compiler is gone, and passes were
    several times slower, because the compiler's version was part of the file's name."""
    load_again()
    monkeypatch.setenv("PATH", str(tmp_path))
    load_again()
    assert len(builds) == 1


def test_another_cpu_has_a_library_of_its_own(
    new_machine: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a home folder that several machines share: `-march=native` makes instructions that others do not have."""
    load_again()
    monkeypatch.setattr(build, "_cpu", lambda: ["processor: 0", "flags: fpu"])
    load_again()
    assert len(builds) == 2 and len(list(new_machine.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"half",
        lambda whole: whole[:5000],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1],
        lambda whole: whole[: -build.DIGEST_BYTES],
        lambda whole: whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        lambda whole: Path(_ctypes.__file__).read_bytes(),
    ],
    ids=["empty", "text", "cut off", "cut in half", "last byte", "no digest", "one bit", "another library"],
)
def test_a_damaged_library_is_built_again(
    new_machine: Path, builds: list[list[str]], damage: Callable[[bytes], bytes]
) -> None:
    """Guards a disk that was full, and files of others: to load a library that is cut off ends the process, and one
    without our functions was a traceback."""
    load_again()
    (file,) = new_machine.iterdir()
    whole = file.read_bytes()
    file.unlink()  # the loaded one must not change
    file.write_bytes(damage(whole))
    load_again()
    assert len(builds) == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("others_may_write", [0o020, 0o002])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(
    new_machine: Path, builds: list[list[str]], what: str, others_may_write: int, tmp_path: Path
) -> None:
    """Guards against code that somebody else has put into the cache: only the folder among the temporary files was
    looked at."""
    load_again()
    (file,) = new_machine.iterdir()
    place = new_machine if what == "folder" else file
    place.chmod(place.stat().st_mode | others_may_write)
    if what == "folder":
        with pytest.warns(UserWarning, match=r"not kept in .*, which others can write into"):
            load_again()
        (other,) = (tmp_path / "temporary").glob("paradraft-*/pass-*.so")
        assert other.stat().st_mode & 0o777 == 0o600
    else:
        load_again()
        assert file.stat().st_mode & 0o777 == 0o600
    assert len(builds) == 2


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_others_is_not_loaded(
    new_machine: Path, builds: list[list[str]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards as the test above; an owner may write whatever the mode says."""
    load_again()
    (file,) = new_machine.iterdir()
    real, foreign = Path.lstat, new_machine if what == "folder" else file

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        return os.stat_result((*found[:4], 12345, *found[5:10])) if path == foreign else found

    monkeypatch.setattr(Path, "lstat", lstat)
    with nullcontext() if what == "file" else pytest.warns(UserWarning, match="not yours"):
        load_again()
    assert len(builds) == 2


@pytest.mark.parametrize("is_link", [True, False])
def test_no_temporary_folder_of_others_is_trusted(
    new_machine: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_link: bool
) -> None:
    """Guards against code that somebody else has put where everybody may write, and a link that leads to a folder of
    the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (folder,) = build._folders()[1:]
    if is_link:
        folder.symlink_to(private)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.warns(UserWarning, match="not kept in"), pytest.raises(build.CannotBuildError, match="yours alone"):
        load_again()
    assert not list(folder.iterdir()) and not builds


def test_the_cache_may_be_a_link(new_machine: Path, builds: list[list[str]], tmp_path: Path) -> None:
    """Guards users who keep their caches on another disk."""
    (tmp_path / "disk").mkdir(mode=0o700)
    new_machine.parent.mkdir()
    new_machine.symlink_to(tmp_path / "disk")
    load_again()
    load_again()
    assert len(list((tmp_path / "disk").iterdir())) == len(builds) == 1


def test_a_cache_that_cannot_be_written_is_done_without(
    new_machine: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards disks that are full and read-only homes: the library is kept, and found, among the temporary files."""
    real = build._write

    def write(file: Path, content: bytes) -> None:
        if file.parent == new_machine:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, content)

    monkeypatch.setattr(build, "_write", write)
    load_again()
    load_again()
    assert len(builds) == 1 and not list(new_machine.iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setattr(Path, "home", lambda: Path("/proc/nowhere"))
    load_again()
    assert len(builds) == 1 and not Path("not").exists()


def test_a_write_that_fails_leaves_nothing(new_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a loss of power between the rename and the data: the file is on the disk before it gets its name."""
    calls: list[str] = []
    real = os.replace
    monkeypatch.setattr(build.os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr(build.os, "replace", lambda old, new: (calls.append("replace"), real(old, new)))
    new_machine.mkdir(parents=True)
    build._write(new_machine / "file", b"content")
    assert calls == ["fsync", "replace", "fsync"] and (new_machine / "file").read_bytes() == b"content"

    def fail(old: str, new: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        build._write(new_machine / "file", b"other")
    assert [(file.name, file.read_bytes()) for file in new_machine.iterdir()] == [("file", b"content")]


def test_processes_at_the_same_time_do_no_harm(new_machine: Path, compiled: bytes) -> None:
    """Guards the ranks of a training, which all begin at once on a new machine, some of them finding a damaged file."""
    new_machine.mkdir(parents=True, mode=0o700)
    key = build.library_key()
    file = new_machine / f"pass-{key}.so"
    file.write_bytes(b"half")
    whole = compiled + build._digest(compiled, key)

    def take(_: int) -> bytes:
        if not build._is_whole(file, key):
            build._write(file, whole)
        assert build._is_whole(file, key)
        return file.read_bytes()

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(take, range(64))) == {whole}
    assert list(new_machine.iterdir()) == [file]


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false", "g++ --no-such-option"])
def test_without_a_compiler(new_machine: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    """Guards machines that cannot build it: torch.compile, or in the end plain PyTorch, does the work."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=r"no passes in C\+\+"):
        assert isinstance(CausalLM(random_model(), vocab_size=60, compiled=True)._compute, CompiledPass)
    assert not list(new_machine.glob("*"))


def test_a_compiler_that_knows_openmp_by_another_name(
    new_machine: Path, compiled: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards Macs: Apple's clang refuses `-fopenmp`, and what is left is built without, not left out. This compiler
    takes no time; test_other_cpus.py compiles the sources without OpenMP."""
    script, made = tmp_path / "clang", tmp_path / "made.so"
    made.write_bytes(compiled)
    script.write_text(
        '#!/bin/sh\nfor flag; do [ "$flag" = -fopenmp ] && { echo "unsupported" >&2; exit 1; }; done\n'
        f'for flag; do last="$flag"; done\ncp {made} "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert isinstance(CausalLM(random_model(), vocab_size=60, compiled=True)._compute, NativePass)

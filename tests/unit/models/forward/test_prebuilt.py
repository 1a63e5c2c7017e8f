"""The libraries that a wheel brings: which one is chosen, that it is whole, and that no compiler is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

import pytest

from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.compiled import CompiledPass
from paradraft.models.forward.cpu import build
from paradraft.models.forward.cpu.prebuilt import LEVELS, level_of
from tests.support.random_models import random_model
from tests.unit.models.forward.test_cpu_build import builds, compiled, load_again, new_machine

__all__ = ["builds", "compiled", "new_machine"]  # fixtures
ROOT = Path(__file__).parents[4]
AVX2 = "flags : fpu sse2 ssse3 avx fma movbe f16c abm bmi1 avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl"
VNNI = f"{AVX512} avx512_vnni"
CPUS = [
    ("flags : fpu sse2 ssse3 avx", None),
    (AVX2, "avx2"),
    (AVX512, "avx2"),
    (f"{AVX2} avx_vnni", "avxvnni"),
    (VNNI, "avx512vnni"),
    (f"{VNNI} avx512_bf16", "avx512bf16"),
    (f"{VNNI} avx512_bf16 avx_vnni amx_bf16 amx_tile", "amx"),
]


@pytest.mark.parametrize(("instructions", "name"), CPUS)
def test_a_cpu_gets_the_library_of_its_instructions(instructions: str, name: str | None) -> None:
    """Guards CPUs against instructions that they do not have, which end the process, and against slower ones."""
    found = level_of("x86_64", instructions)
    assert (None if found is None else found.name) == name
    assert level_of("aarch64", instructions) is None


@pytest.fixture
def shipped(new_machine: Path, compiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library of a wheel for this CPU, as it is installed where others of a group may write."""
    level = level_of("x86_64", VNNI)
    assert level is not None
    monkeypatch.setattr(build, "level_of", lambda machine, instructions: level if "fpu" in instructions else None)
    monkeypatch.setattr(build, "FOLDER", tmp_path / "libraries")
    build.FOLDER.mkdir(mode=0o775)
    file = build.FOLDER / level.file
    file.write_bytes(compiled + build._digest(compiled, build._key(level.flags)))
    file.chmod(0o664)
    build._shipped.cache_clear()
    yield file
    build._shipped.cache_clear()


def test_the_library_of_the_wheel_is_loaded(shipped: Path, new_machine: Path, builds: list[list[str]]) -> None:
    """Guards machines without a compiler; what was packed for another library must not be taken for this one's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_again()
    assert build.library()._name == str(shipped)
    assert not builds and not new_machine.exists()
    key = build.library_key()
    shipped.unlink()
    build._shipped.cache_clear()
    with pytest.warns(UserWarning, match="No such file"):
        assert build.library_key() != key


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        lambda whole: whole[: -build.DIGEST_BYTES] + build._digest(whole[: -build.DIGEST_BYTES], "other sources"),
        lambda whole: b"no library" + build._digest(b"no library", build._key(level_of("x86_64", VNNI).flags)),
    ],
    ids=["cut off", "one bit", "other sources", "cannot be loaded"],
)
def test_a_damaged_library_of_a_wheel_is_refused(
    shipped: Path,
    new_machine: Path,
    builds: list[list[str]],
    damage: Callable[[bytes], bytes],
) -> None:
    """Guards a disk that was full: one that is cut off ends the process, one of other sources gives wrong tokens, and
    without a word the user would not know why passes are slow or why a compiler runs."""
    whole = shipped.read_bytes()
    shipped.write_bytes(damage(whole))
    with pytest.warns(UserWarning, match=rf"{shipped} came with this installation .* install the wheel again"):
        load_again()
    (file,) = new_machine.iterdir()
    assert len(builds) == 1 and build.library()._name == str(file) and build.library_key() in file.name


def test_a_damaged_library_without_a_compiler(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against passes that are slow without a word."""
    shipped.write_bytes(b"half")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    build._library.cache_clear()
    with (
        pytest.warns(UserWarning, match="install the wheel again"),
        pytest.warns(UserWarning, match=r"no passes in C\+\+"),
    ):
        assert isinstance(CausalLM(random_model(), vocab_size=60, compiled=True)._compute, CompiledPass)


def test_another_cpu_compiles(shipped: Path, builds: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards CPUs that a wheel has no library for."""
    monkeypatch.setattr(build, "_cpu", lambda: ["flags: old"])
    load_again()
    assert len(builds) == 1 and build.library()._name != str(shipped)


RUN = """
import sys, warnings
from pathlib import Path
from paradraft.models.forward.cpu import build
level = {each.name: each for each in build.LEVELS}[sys.argv[1]]
build.level_of = lambda machine, instructions: level
warnings.simplefilter("error", UserWarning)
from paradraft.engine.loader import load
engine = load("pocket", drafter="pard", dtype="int8")
assert all(lm.is_native for lm in (engine.target.lm, *engine.drafter.models))
maps = Path("/proc/self/maps").read_text().split()
print({place for place in maps if "/pass-" in place}, {place for place in maps if "libgomp" in place}, sep="\\n")
print(engine.generate(engine.target.tokenizer("def f(x):").input_ids, max_new_tokens=16).tokens)
"""


@pytest.mark.slow
@pytest.mark.skipif(level_of(build.platform.machine(), build.instructions()) is None, reason="of x86 CPUs")
def test_a_wheel_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `make wheel`: installed where there is no compiler, the library of each kind of CPU is loaded from the
    wheel beside torch's OpenMP, computes the same, and leaves nothing in the cache."""
    of_this_cpu = level_of(build.platform.machine(), build.instructions())
    levels = list(dict.fromkeys([LEVELS[0], of_this_cpu]))
    monkeypatch.setattr(build, "LEVELS", levels)
    build.build_for_wheel(tmp_path / "libraries")
    code = subprocess.run(
        ["objdump", "-d", tmp_path / "libraries" / LEVELS[0].file], capture_output=True, text=True, check=True
    ).stdout
    assert "%ymm" in code and not any(of_avx512 in code for of_avx512 in ("%zmm", "%ymm16", "%xmm16", "%k1"))

    site, pip = tmp_path / "site", [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    env = {**os.environ, "PARADRAFT_LIBRARIES": str(tmp_path / "libraries")}
    made = ("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", tmp_path / "dist", ROOT)
    for each in (env, os.environ):  # without the libraries it is for all systems
        subprocess.run([*pip, *made], env=each, check=True)
    wheel, pure = sorted((tmp_path / "dist").iterdir(), key=lambda file: "-any" in file.name)
    assert fnmatch(wheel.name, "paradraft-*-py3-none-manylinux_2_*_x86_64.whl") and pure.name.endswith("-any.whl")
    assert not any("/libraries/" in name for name in ZipFile(pure).namelist())
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)

    clean = {"PATH": str(tmp_path / "empty"), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert not any(shutil.which(compiler, path=clean["PATH"]) for compiler in ("g++", "clang++", "c++"))
    tokens = set()
    for level in levels:
        done = subprocess.run(
            [sys.executable, "-c", RUN, level.name], env={**clean, "PYTHONPATH": str(site)}, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and done.stderr == "", done.stderr
        loaded, openmp, found = done.stdout.splitlines()
        assert loaded == repr({str(site / "paradraft/models/forward/cpu/libraries" / level.file)})
        assert openmp.count("/torch/lib/") == openmp.count("libgomp") == 1
        tokens.add(found)
    assert len(tokens) == 1
    assert not list((tmp_path / "cache").rglob("pass-*"))

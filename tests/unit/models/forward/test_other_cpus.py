"""The C++ compiled for other CPUs: the same bits, and no warnings of the compiler."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu import build
from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.cpu.prebuilt import LEVELS, Level
from paradraft.models.quantized import QuantizedTensor
from tests.support.decoding import empty_rows
from tests.support.random_models import random_model
from tests.unit.models.test_quantized import FORMATS, assert_kernels_follow, product, random_weight, shapes_of

STRICT = ("-Wall", "-Wextra", "-Werror")
HAS = torch.cpu.get_capabilities()
OF_PRODUCTS = {"integers.cpp", "packing.cpp"}
"""Sources of the products with weights of few bits."""


@pytest.fixture
def kept(pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where libraries stay until the next run of the tests, if it has a cache: the compiler takes half a minute."""
    cache = getattr(pytestconfig, "cache", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.mkdir("libraries") if cache else tmp_path))
    build._library.cache_clear()
    yield
    build._library.cache_clear()


@pytest.fixture
def only_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles all other sources without optimization, in a sixth of the time."""
    problem = build._problem

    def quick(command: list[str]) -> str | None:
        is_needed = not OF_PRODUCTS.isdisjoint(Path(word).name for word in command)
        return problem(command if is_needed else [*command, "-O0"])

    monkeypatch.setattr(build, "_problem", quick)


def check_products() -> None:
    for format in FORMATS:
        if format.group in (0, 16, 32):
            assert_kernels_follow(random_weight(format, shapes_of(format)[0]))
    extremes = QuantizedTensor(torch.full((4, 64), -128, dtype=torch.int8), torch.ones(4, 1), bits=8, group=64)
    assert product(PackedMatrix([extremes]), torch.full((1, 64), -1.0)).tolist() == [[64 * 128.0] * 4]


def check_passes() -> None:
    for dtype, are_rounded in itertools.product([torch.float32, torch.bfloat16], [False, True]):
        model = random_model()
        if are_rounded:
            model = model.to(torch.bfloat16)
        lm, text = CausalLM(model.to(dtype), vocab_size=80), torch.arange(1, 31)[None]
        empty_rows(lm, 1)
        whole = lm.forward(text).logits
        expected = lm.model.double()(text).logits
        error = 1e-4 if dtype == torch.float32 else 0.02
        assert (whole - expected).square().mean().sqrt() < error * expected.std()
        empty_rows(lm, 1)
        parts = []
        for part in text.split([7, 1, 9, 13], dim=1):
            parts.append(lm.forward(part).logits)
            lm.cache.advance([part.shape[1]])
        assert isinstance(lm._compute, NativePass) and torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.skipif(not HAS.get("fma3", False), reason="of CPUs that fuse, in that way")
@pytest.mark.parametrize(
    "flags",
    [
        ("-march=haswell", "-mtune=znver2", "-DPORTABLE", *STRICT),
        ("-mno-amx-bf16", "-mno-amx-tile"),
        pytest.param(("-DPORTABLE",), marks=pytest.mark.slow),
        pytest.param(("-march=haswell", "-mtune=znver2"), marks=pytest.mark.slow),
    ],
)
def test_other_cpus_compute_the_same_and_in_one_order(
    kept: None, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Guards CPUs with half as many registers and no products of bfloat16, those with such products and no tiles, and
    equal bits on those for which GCC fuses products and sums in some loops and not in others; and systems without
    futex, CPU sets and OpenMP."""
    if "-mno-amx-tile" in flags and "amx_tile" not in " ".join(build._cpu()):
        pytest.skip("this CPU has no tiles that could be left out")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    if "-DPORTABLE" in flags:
        without = build.openmp_flags()[-1]
        monkeypatch.setattr(build, "openmp_flags", lambda: [without])
    build.library()  # a compiler that fails says why
    check_products()
    check_passes()


@pytest.mark.usefixtures("kept", "only_products")
@pytest.mark.skipif(not HAS.get("avx2", False), reason="of x86 CPUs")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("-march=x86-64", id="plain", marks=pytest.mark.slow),
        pytest.param("-mno-avx512vnni -mno-avxvnni", id="no VNNI", marks=pytest.mark.slow),
        pytest.param("-march=haswell -mavxvnni", id="VNNI of 256 bits", marks=pytest.mark.slow),
        pytest.param("-march=sandybridge", id="AVX", marks=pytest.mark.slow),
    ],
)
def test_products_on_other_cpus_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """Guards sums of 16 bits against numbers that do not fit, and CPUs that fuse nothing."""
    instructions = " ".join(build._cpu())
    if ("-mavxvnni" in flags and "avx_vnni" not in instructions) or (
        "-mno" in flags and "avx512bw" not in instructions
    ):
        pytest.skip("this CPU has no such instructions")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags.split()))
    check_products()


@pytest.mark.slow
@pytest.mark.usefixtures("kept", "only_products")
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_libraries_of_wheels_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, level: Level) -> None:
    """Guards the same on machines that take a wheel's library."""
    if not level.needs <= {*build.instructions().split()}:
        pytest.skip("this CPU has no such instructions")
    monkeypatch.setattr(build, "FLAGS", (*build.FOR_ANY_CPU, *level.flags))
    check_products()


@pytest.mark.slow
def test_the_compiler_has_nothing_to_say() -> None:
    """Guards the C++ as a linter guards the Python; the portable code is compiled with `STRICT` above."""
    files = [build.NATIVE / name for name in build.SOURCES if name.endswith(".cpp")]
    command = ["g++", *build.FLAGS, *build.openmp_flags()[0], *STRICT, "-fsyntax-only"]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

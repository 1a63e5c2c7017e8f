"""The library in C++: built once, kept where it is safe, and not missed where it cannot be had."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paradraft.models.causal_lm import CausalLM
from paradraft.models.native import build
from paradraft.models.native.forward import NativePass
from paradraft.models.torch_pass import TorchPass
from tests.unit.models.random_models import random_model


@pytest.fixture
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where nothing has been built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._library.cache_clear()
    yield tmp_path / "paradraft"
    build._library.cache_clear()


def test_it_is_built_once(new_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards ten seconds of every process."""
    build.library()
    (file,) = new_machine.iterdir()
    build._library.cache_clear()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    build.library()
    assert list(new_machine.iterdir()) == [file]


def test_a_damaged_library_is_built_again(new_machine: Path) -> None:
    """Guards a disk that was full."""
    build.library()
    (file,) = new_machine.iterdir()
    file.unlink()  # the loaded one must not change
    file.write_bytes(b"half")
    build._library.cache_clear()
    assert build.library().packed_size(1, 1)


def test_no_folder_of_others_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against code that somebody else has put where everybody may write."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = build._folder()
    assert folder.parent == tmp_path
    folder.chmod(0o777)
    with pytest.raises(build.CannotBuildError, match="yours alone"):
        build._folder()


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("fma3", False), reason="of CPUs that fuse, in that way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("are_rounded", [False, True])
def test_other_cpus_compute_the_same_and_in_one_order(
    new_machine: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, are_rounded: bool
) -> None:
    """Guards CPUs with half as many registers and no products of bfloat16, and equal bits on those for which GCC
    fuses products and sums in some loops and not in others."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-march=haswell", "-mtune=znver2"))
    model = random_model()
    if are_rounded:
        model = model.to(torch.bfloat16)
    lm, text = CausalLM(model.to(dtype), vocab_size=80), torch.arange(1, 31)[None]
    lm.clear(1)
    whole = lm.forward(text)
    expected = lm.model.double()(text).logits
    error = 1e-4 if dtype == torch.float32 else 0.02
    assert (whole - expected).square().mean().sqrt() < error * expected.std()
    lm.clear(1)
    parts = []
    for part in text.split([7, 1, 9, 13], dim=1):
        parts.append(lm.forward(part))
        lm.keep([part.shape[1]])
    assert isinstance(lm._compute, NativePass) and torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false", "g++ --no-such-option"])
def test_without_a_compiler(new_machine: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    """Guards machines that cannot build it: torch.compile, or in the end plain PyTorch, does the work."""
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=r"no passes in C\+\+"):
        assert isinstance(CausalLM(random_model(), vocab_size=60, compiled=True)._compute, TorchPass)
    assert not list(new_machine.glob("*"))


def test_the_compiler_has_nothing_to_say() -> None:
    """Guards the C++ as a linter guards the Python."""
    command = ["g++", *build.FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*command, Path(build.__file__).with_name(build.SOURCES[0])], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

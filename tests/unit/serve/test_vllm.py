"""What starts vLLM's server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from paradraft.serve.vllm import VllmServer
from tests.support.fake_vllm import executable, server_python

PARD = {"method": "draft_model", "model": "my draft", "num_speculative_tokens": 3}


def server(python: Path = Path("/venv/bin/python"), **given: Any) -> VllmServer:
    return VllmServer(python=python, target="it's", speculative=PARD, **given)


def test_the_line_is_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards a line that is pasted: each argument one word, and the key not in it, which others could read in a list of
    processes."""
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    made = server(options={"--port": 8000}, eager=True, threads=2, key_variable="MY_KEY")
    words = shlex.split(made.line)
    variables = ["OMP_NUM_THREADS=2", "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_API_KEY=$MY_KEY"]
    assert words == [*variables, *made.arguments] and "secret" not in made.line
    assert made.arguments[3:] == [
        "--model", "it's", "--port", "8000", "--enforce-eager", "--speculative-config",
        '{"method": "draft_model", "model": "my draft", "num_speculative_tokens": 3}',
    ]  # fmt: skip
    assert (
        server(key_variable="VLLM_API_KEY").environment == {} and "KEY" not in server(key_variable="VLLM_API_KEY").line
    )
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert server(tmp_path / "bin" / "python").environment == {"LD_PRELOAD": str(library)}
    assert VllmServer(python=tmp_path / "bin" / "python", target="t", speculative=None).environment == {}
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    assert server(tmp_path / "bin" / "python").environment == {"LD_PRELOAD": f"{library}:mine.so"}


def test_one_gpu_is_one_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against another GPU than --device names where a scheduler has given this process some of them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server(device=1).environment["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8a")
    assert server(device=1).environment["CUDA_VISIBLE_DEVICES"] == "GPU-8a"
    with pytest.raises(ValueError, match="cuda:2: CUDA_VISIBLE_DEVICES=4,GPU-8a names 2"):
        _ = server(device=2).environment


def test_vllm_is_looked_for_before_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of another Python's, and against a vLLM that fails at a device after a minute."""
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    fake = server(server_python(tmp_path))
    assert fake.check("auto") == fake.check("cpu") == "vllm-cpu 0.0.fake"
    with pytest.raises(ValueError, match=r"--device cuda:1: this vLLM .vllm-cpu 0.0.fake. is built for CPUs"):
        fake.check("cuda:1")
    with pytest.raises(ValueError, match=r"--device cpu: this vLLM .vllm 0.33. is built for GPUs"):
        server(executable(tmp_path / "gpu", "print('vllm 0.33')")).check("cpu")
    with pytest.raises(ValueError, match=r"not installed in its environment .there is no module vllm"):
        server(executable(tmp_path / "without", "print('none')")).check("auto")
    with pytest.raises(ValueError, match=r"not installed in its environment .no space"):
        server(executable(tmp_path / "broken", "import sys; sys.exit('no space')")).check("auto")
    with pytest.raises(ValueError, match="cannot be run"):
        server(tmp_path / "none").check("auto")

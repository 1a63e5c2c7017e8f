"""Memory that runs out in the middle of a command."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.models import cached_rows, kv_cache
from paradraft.sources import rounding_reader
from paradraft.train.run.trainer import Loop
from tests.e2e.conftest import EXACT, MISTAKE, Paradraft, assert_mistake
from tests.e2e.test_cli_train import recipe as recipe

TOO_MANY = 2**44
LESS = "use a smaller batch, shorter texts or smaller models"


def take_all(*_: object, **__: object) -> torch.Tensor:
    """More than any machine has."""
    return torch.empty(TOO_MANY)


def test_a_cache_that_does_not_fit_after_all(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback where memory was free when it was asked for, and then was not."""
    folder = shutil.copytree(family / "target", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": TOO_MANY}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(kv_cache, "free_bytes", lambda device: math.inf)
    monkeypatch.setattr(cached_rows, "FIRST_CAPACITY", TOO_MANY)
    asked = ["--target", folder, "--prompt", "x", "--capacity", TOO_MANY, *EXACT]
    assert_mistake(paradraft("generate", *asked), f"out of memory: {LESS}")


def test_weights_that_do_not_fit_are_not_called_damaged(
    family: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against advice to load a file again that is whole, or to use a dtype that takes more memory."""
    asked = ["--target", family / "target", "--prompt", "x", "--dtype", "int8", "--device", "cpu"]
    monkeypatch.setattr(rounding_reader, "rounded", take_all)
    assert_mistake(paradraft("generate", *asked), f"out of memory: {LESS}")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", take_all)
    assert_mistake(paradraft("generate", *asked), f"out of memory: {LESS}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out of GPU memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out of GPU memory"),
    ],
)
def test_every_kind_of_error_is_one_line(
    family: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """Guards what a machine without a GPU cannot bring about; any other error stays a traceback, for it is a bug."""

    asked = ["--target", family / "target", "--prompt", "x", *EXACT]
    allocate = Mock(side_effect=[error, RuntimeError("shape '[2]' is invalid for input of size 3")])
    monkeypatch.setattr(kv_cache, "allocate", allocate)
    assert_mistake(paradraft("generate", *asked), f"{said}: {LESS}")
    with pytest.raises(RuntimeError, match="is invalid"):
        paradraft("generate", *asked)


def test_training_that_ran_out_of_memory_goes_on(
    paradraft: Paradraft, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the checkpoint, and the advice: what it names first may differ when a run goes on."""
    out, take_step = tmp_path / "drafter", Loop._step

    def step(loop: Loop, number: int, *rest: object) -> object:
        return take_all() if number == 4 else take_step(loop, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_step", step)
        first = paradraft("train", "pard", recipe, f"out={out}")
    assert first.code == MISTAKE and "step 4/" in first.out
    assert first.err.startswith("paradraft: out of memory: lower samples_per_pass or set gradient_checkpointing=true")
    assert first.err.count("\n") == 1
    second = paradraft("train", "pard", recipe, f"out={out}", "samples_per_pass=1", "gradient_checkpointing=true")
    assert second.code == 0
    assert [text in second.out for text in ("step 4/", "step 5/", "step 6/")] == [False, True, True]

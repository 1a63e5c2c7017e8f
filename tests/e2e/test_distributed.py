"""Training by several processes, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from paradraft.models.forward.cpu.build import cache_folder
from paradraft.train.drafters.pard_recipe import PardRecipe
from tests.support.training import train_pard

PARADRAFT = str(Path(sys.executable).with_name("paradraft"))


def recipe_text(family: Path, folder: Path, out: Path, **further: object) -> str:
    data = folder / "data.txt"
    data.write_text("helloworld" * 12 + "abcabcabc" * 9 + "aab" * 5)
    settings = {
        "model": str(family / "draft"), "data": [str(data)], "out": str(out), "steps": 4, "samples_per_step": 4,
        "k": 3, "max_length": 20, "lr": 1e-2, "warmup_steps": 1, "bf16": False, "log_every": 1, "save_every": 2,
        "optimizer": "adamw", "device": "cpu", "held_out": 3, "evaluate_every": 2, "teacher": str(family / "target"),
        "prompts": 2, "answer_tokens": 12, "prompt_tokens": 4, "weighting": "expected_length",
    }  # fmt: skip
    return json.dumps(settings | further)


def history(out: Path) -> list[dict[str, object]]:
    lines = (out / "history.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("rows_per_s", "left_s")} for line in lines]


FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}  # fmt: skip
"""What `accelerate launch --use_fsdp …` hands to the processes; it would not do so for CPUs."""


def launch(*command: str, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with tempfile.TemporaryDirectory() as cache:
        # Other tests have the same target, and would draft with what is trained here. Kernels need not be built again.
        (own := Path(cache) / "paradraft").mkdir(mode=0o700)
        if (kept := cache_folder()) is not None:
            for kernels in kept.glob("*.so"):
                shutil.copy2(kernels, own)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache} | settings
        return subprocess.run([*starter, *command], env=environment, capture_output=True, text=True, timeout=280)


WITHOUT_A_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="this is about machines without a GPU")
SLOW_WITHOUT_A_GPU = () if torch.accelerator.is_available() else pytest.mark.slow
"""`make test` takes one way to a CPU: to leave it to the machine, where that leads there."""


@pytest.mark.parametrize(
    ("device", "sharded"),
    [
        pytest.param("auto", False, marks=WITHOUT_A_GPU),
        pytest.param("cpu", False, marks=SLOW_WITHOUT_A_GPU),
        pytest.param("cpu", True, marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_what_one_does(family: Path, tmp_path: Path, device: str, sharded: bool) -> None:
    """Guards data-parallel training, and FSDP2, whose weights are in pieces: losses, accuracies and lengths are
    those of one process, and each report comes once. And runs that leave `device` to the machine: each process trained
    all by itself, all of them wrote into one folder, and the run failed without a word."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    train_pard(PardRecipe.model_validate_json(recipe_text(family, tmp_path, alone)), lambda report: None)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(family, tmp_path, together, device=device))
    done = launch(PARADRAFT, "train", "pard", str(file), settings=FSDP if sharded else {})
    assert done.returncode == 0, done.stderr
    one, two = history(alone), history(together)
    assert [entry.keys() for entry in one] == [entry.keys() for entry in two]
    for expected, found in zip(one, two, strict=True):
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-5), (key, expected["step"])
    assert done.stdout.count("step 4/4") == 1
    assert (together / "config.json").exists()


ASKED_TO_STOP = """
import os, signal
from paradraft import cli
from paradraft.train.run.trainer import Loop

step = Loop._step

def asked(loop, number, batches):
    if number == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(loop, number, batches)

Loop._step = asked
cli.main()
"""


@pytest.mark.slow
def test_all_processes_stop_after_the_same_step(family: Path, tmp_path: Path) -> None:
    """Guards against processes that wait for one that has stopped, and against a checkpoint that some did not reach:
    one process alone is asked to stop, all do, and the run goes on as one that was never stopped."""
    file, script = tmp_path / "recipe.yaml", tmp_path / "asked_to_stop.py"
    script.write_text(ASKED_TO_STOP)
    alone, together = tmp_path / "alone", tmp_path / "together"
    train_pard(PardRecipe.model_validate_json(recipe_text(family, tmp_path, alone)), lambda report: None)
    file.write_text(recipe_text(family, tmp_path, together))
    first = launch(str(script), "train", "pard", str(file), settings={})
    assert first.stderr.count("exitcode  : 143 ") == 2, first.stderr
    assert first.stdout.splitlines()[-1].startswith("stopped after step 3 of 4, with a checkpoint in ")
    second = launch(PARADRAFT, "train", "pard", str(file), settings={})
    assert second.returncode == 0, second.stderr
    assert [text in second.stdout for text in ("step 3/", "step 4/")] == [False, True]
    for expected, found in zip(history(alone), history(together), strict=True):
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-5), (key, expected["step"])


SHORT_OF_MEMORY = """
import os, sys
from paradraft import cli
from paradraft.train import memory

memory.free_bytes = lambda device: 1e12 if os.environ["RANK"] == "0" else 1e5
cli.main()
"""


@pytest.mark.slow
def test_a_mistake_is_told_once(family: Path, tmp_path: Path) -> None:
    """Guards against as many complaints as processes, against silence where not the first process finds the mistake,
    and against processes that wait for one that has ended."""
    file, script = tmp_path / "recipe.yaml", tmp_path / "short_of_memory.py"
    file.write_text(recipe_text(family, tmp_path, tmp_path / "out"))
    script.write_text(SHORT_OF_MEMORY)
    done = launch(str(script), "train", "pard", str(file), "muon_lr=1e-2", settings={})
    said = [line for line in done.stderr.splitlines() if line.startswith("paradraft: ")]
    assert [line.split(",")[0] for line in said] == [
        "paradraft: warning: muon_lr=0.01 is ignored without optimizer=muon",
        "paradraft: this recipe needs 0.0 GiB (models 0.0",
    ]
    assert done.stderr.count("exitcode  : 2 ") == 2 and "Error:" not in done.stderr.replace("ChildFailedError:", "")

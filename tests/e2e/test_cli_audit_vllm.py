"""`paradraft audit` of vLLM itself, where it is installed: an honest engine, and faults planted in what it loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paradraft.engine.speculation import Speculation
from paradraft.export.handoff import VLLM, hand_off
from paradraft.export.vllm import speculative_config
from paradraft.models.runtime import Runtime
from paradraft.serve.address import bound, url_of
from paradraft.serve.vllm import VllmServer
from paradraft.sources.loading import pocket_folder
from tests.e2e.conftest import Outcome, Paradraft
from tests.support.installed_vllm import MARKS, PYTHON

pytestmark = MARKS
Plant = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket drafter as vLLM loads it."""
    out = tmp_path_factory.mktemp("exported") / "out"
    hand_off("pocket", "pocket", VLLM, out, k=4, prompts=[], max_new_tokens=1, runtime=Runtime(device="cpu"))
    return out


def verdict(outcome: Outcome) -> dict[str, Any]:
    return dict(json.loads(outcome.out.splitlines()[-1]))


def test_the_exported_folder_drafts_there_as_here(exported: Path, paradraft: Paradraft) -> None:
    """Guards what `export` promises: the same texts, and in nearly every round as many accepted tokens as here."""
    options = ["--target", "pocket", "--engine", "vllm", "--vllm-python", PYTHON, "-k", 4, "--samples", 0]
    outcome = paradraft("audit", exported, *options)
    assert outcome.code == 0, outcome.out
    drafting = verdict(outcome)["drafting"]
    assert drafting["cause"] is None and drafting["equal"] > 0.95 and drafting["rounds"] > 60


def mask(config: dict[str, Any]) -> None:
    config["mask_token_id"] = config["pard_token"] = 0


def rope(config: dict[str, Any]) -> None:
    config["rope_parameters"]["rope_theta"] = 500_000.0


def nothing(config: dict[str, Any]) -> None:
    """Of the folder nothing is wrong."""


@pytest.mark.parametrize(
    ("plant", "drafter", "words"),
    [
        (mask, "pard", "wrong mask: the mask token is 0, not 4088"),
        (rope, "pard", "wrong rope: the engine rotates with rope_theta=500000"),
        (nothing, "autoregressive", "one token a pass"),
    ],
)
def test_faults_are_named(
    exported: Path, tmp_path: Path, paradraft: Paradraft, plant: Plant, drafter: str, words: str
) -> None:
    """Guards users against searching for days: the engine loads another config than the drafter was trained with."""
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    config = json.loads((other / "config.json").read_text())
    plant(config)
    (other / "config.json").write_text(json.dumps(config))
    target = str(pocket_folder("target"))
    with closing(bound("127.0.0.1", 0)) as free:
        url = url_of(free)
    speculation = Speculation(drafter=drafter, draft=str(other), k=4, lengths="fixed")
    settings = {"--host": "127.0.0.1", "--port": url.rpartition(":")[2], "--served-model-name": "target"}
    server = VllmServer(
        python=PYTHON, target=target, speculative=speculative_config(speculation, target), eager=True,
        options={**settings, "--max-num-seqs": 4},
    )  # fmt: skip
    with server.running(url):
        options = ["--target", "pocket", "--endpoint", f"{url}/v1", "--model", "target", "-k", 4, "--samples", 0]
        outcome = paradraft("audit", exported, *options)
    assert outcome.code == 1
    assert words in verdict(outcome)["drafting"]["cause"]


def test_sampling_there_is_not_lossless_on_cpus(exported: Path, paradraft: Paradraft) -> None:
    """Guards the control that nobody has planted: vLLM 0.32 loses sampling parameters when it speculates on a CPU."""
    options = ["--target", "pocket", "--engine", "vllm", "--vllm-python", PYTHON, "-k", 4]
    outcome = paradraft("audit", exported, *options)
    assert outcome.code == 1
    found = verdict(outcome)
    assert "greedy answers are the model's, sampled ones are not" in found["reason"]
    assert found["uniformity"]["distance"] > 2 * found["uniformity"]["limit"]

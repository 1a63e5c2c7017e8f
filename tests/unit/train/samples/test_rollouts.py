"""Samples that the drafter in training continues."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.data.samples import BEGAN, Sample, prompt_of
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.run.acceptance import DrafterLoader
from paradraft.train.run.progress import Report
from paradraft.train.samples import SourceData, load_source, source_config, source_names
from paradraft.train.samples.rollouts import Config, Rollouts
from tests.support.training import prepare_pard, train_pard
from tests.unit.train.run.test_trainer import StoppedError, recipe_for, stop_after

EXACT = Runtime(dtype="float64", compiled=False)


def data_of(samples: list[Sample], **changes: Any) -> SourceData:
    defaults = {"samples": samples, "per_step": 4, "steps": 8, "seed": 3, "prompt_tokens": 5, "is_taught": True}
    return SourceData(**{**defaults, **changes})


def texts() -> list[Sample]:
    """Some with a prompt, some plain; all different."""
    plain = [Sample(tokens=[1 + i, 2, 3, 4, 5, 6, 7, 8 + i, 9, 10, 11], is_label=[True] * 11) for i in range(5)]
    return plain + [Sample(tokens=[20 + i, 2, 3, 4, 30], is_label=[False, False, True, True, True]) for i in range(4)]


def student(family: Path) -> DrafterLoader:
    return DrafterLoader(str(family / "target"), drafter="autoregressive", k=4, runtime=EXACT)


def test_share_and_period(family: Path) -> None:
    """Guards the mix that a recipe asks for: exactly that share of every period is the drafter's, also of the last,
    which is shorter; all else is the data's, in its order, and nothing changes between two renewals."""
    samples, loader = texts(), student(family)
    source = Rollouts(Config(every=3, share=0.5), data_of(samples))
    fixed = load_source("dataset", data_of(samples))
    assert [step for step in range(9) if source.is_due(step)] == [0, 3, 6]
    replaced = {}
    for step in range(8):
        if source.is_due(step):
            source.renew(step, loader.target, loader.load(family / "draft"))
        new, old = source.samples_of(step), fixed.samples_of(step)
        assert source.samples_of(step) == new
        replaced[step] = sum(a is not b for a, b in zip(new, old, strict=True))
        for a, b in zip(new, old, strict=True):
            if a is b:
                continue
            prompt = prompt_of(b, most=5)
            assert list(a.tokens[: len(prompt)]) == prompt and len(prompt) < len(a.tokens) <= len(b.tokens)
            assert list(a.is_label) == [False] * len(prompt) + [True] * (len(a.tokens) - len(prompt))
    assert [sum(replaced[step] for step in steps) for steps in ((0, 1, 2), (3, 4, 5), (6, 7))] == [6, 6, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_the_drafters_own(family: Path, temperature: float) -> None:
    """Guards on-policy text against tokens of the target: an answer is the text that the draft model alone would write
    with the same seed. Control: it is not the text of the target."""
    samples, loader = texts(), student(family)
    source = Rollouts(Config(every=2, share=1, temperature=temperature), data_of(samples))
    source.renew(0, loader.target, loader.load(family / "draft"))
    alone, target = (load(str(family / name), runtime=EXACT) for name in ("draft", "target"))
    order = load_source("dataset", data_of(samples))
    differs = 0
    for index, (old, new) in enumerate(
        (old, new)
        for step in range(2)
        for old, new in zip(order.samples_of(step), source.samples_of(step), strict=True)
    ):
        prompt = prompt_of(old, most=5)
        settings = {
            "max_new_tokens": len(old.tokens) - len(prompt),
            "sampling": Sampling(temperature=temperature, seed=3 * 1_000_003 + index),
        }
        assert list(new.tokens[len(prompt) :]) == alone.generate(prompt, **settings).tokens
        differs += list(new.tokens[len(prompt) :]) != target.generate(prompt, **settings).tokens
    assert differs


def taught(family: Path, folder: Path, **settings: object) -> PardRecipe:
    """A fast run whose learning rate does not depend on its length."""
    common = {
        "teacher": str(family / "target"), "source": "rollouts:every=2:share=1:temperature=0", "schedule": "constant",
        "optimizer": "adamw", "lr": 3e-2, "warmup_steps": 0, "prompt_tokens": 4, "k": 2,
    }  # fmt: skip
    return recipe_for(family, folder, **{**common, **settings})


def test_answers_are_of_the_current_weights(family: Path, tmp_path: Path) -> None:
    """Guards on-policy training against answers of old weights: those of steps 3 and 4 are of the drafter after step 2,
    as a run of two steps saves it. Control: the draft at the beginning writes something else."""
    begun = taught(family, tmp_path, out=tmp_path / "begun", steps=4, save_every=3)
    with pytest.raises(StoppedError):
        train_pard(begun, stop_after(4))
    state = torch.load(begun.out / "checkpoint" / "step-00000003" / "custom_checkpoint_0.pkl")
    short = taught(family, tmp_path, out=tmp_path / "short", steps=2)
    train_pard(short, lambda report: None)
    source = prepare_pard(begun).source
    source.load_state_dict(state)
    samples = [sample for step in (2, 3) for sample in source.samples_of(step)]
    assert len(samples) == len(state["continued"]) == 4
    mask = prepare_pard(begun).trainee.masks[0]

    def is_greedy(folder: Path) -> bool:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for sample in samples:
            first = list(sample.is_label).index(True)
            logits = model(torch.tensor([list(sample.tokens)])).logits[0, :, :mask]
            if logits.argmax(-1)[first - 1 : -1].tolist() != list(sample.tokens[first:]):
                return False
        return True

    assert is_greedy(short.out) and not is_greedy(family / "draft")


def test_a_run_goes_on_in_the_middle_of_a_period(family: Path, tmp_path: Path) -> None:
    """Guards resuming: the answers of a period are those of its beginning, whose weights a resumed run no longer has.
    Stops in the middle of a period and at its end change no bit of any loss."""
    settings = {"source": "rollouts:every=4:share=0.5", "steps": 10, "save_every": 2}
    whole, begun = (taught(family, tmp_path, out=tmp_path / name, **settings) for name in ("whole", "begun"))
    expected: list[Report] = []
    train_pard(whole, expected.append)
    for step in (7, 9):  # from the checkpoints after steps 6 and 8
        with pytest.raises(StoppedError):
            train_pard(begun, stop_after(step))
    resumed: list[Report] = []
    train_pard(begun, resumed.append)
    assert [(report.step, report.loss) for report in resumed] == [(r.step, r.loss) for r in expected[8:]]
    assert (begun.out / "model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("rollout", "source=rollout: use one of dataset, rollouts"),
        ("rollouts:every=0", "every=0: use at least 1 step"),
        ("rollouts:share=0", "share=0.0: use a number above 0, at most 1"),
        ("rollouts:share=nan", "share=nan: use a number above 0, at most 1"),
        ("rollouts:temperature=-1", "temperature=-1.0: use 0"),
        ("rollouts:evry=3", "'evry=3' is no setting=value of it; its settings are every, share, temperature"),
        ("rollouts:every=x", "every='x': use a whole number"),
    ],
)
def test_wrong_settings(family: Path, tmp_path: Path, source: str, message: str) -> None:
    """Guards users' mistakes: one line with the setting, before any data or model is read."""
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        source_config(source)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="source="):
        recipe_for(family, tmp_path, source=source)


def test_runs_that_cannot_use_it(family: Path, tmp_path: Path) -> None:
    """Guards against a run that learns nothing: without a teacher the drafter's own tokens have no gradient."""
    with pytest.raises(
        ValueError, match="source=rollouts: a drafter learns nothing from its own tokens without a teach"
    ):
        prepare_pard(recipe_for(family, tmp_path, source="rollouts"))
    few = taught(family, tmp_path, source="rollouts:every=1:share=0.1")
    with pytest.raises(ValueError, match=r"share=0\.1: of the 2 samples between two renewals it is none, raise every"):
        prepare_pard(few)
    logged = Sample(tokens=[1, 2, 3], is_label=[False, True, True], rounds=[0, BEGAN, 0], least_round=BEGAN)
    with pytest.raises(ValueError, match=r"data\.anchors are places in logged answers, .*: leave one out"):
        Rollouts(Config(), data_of([*texts(), logged]))


def test_the_source_is_part_of_the_identity(family: Path, tmp_path: Path) -> None:
    """Guards old runs, whose identity names no source, and new ones against going on with other samples."""
    recipe = recipe_for(family, tmp_path)
    assert "source" not in recipe.identity and recipe.source == "dataset" in source_names()
    begun = taught(family, tmp_path)
    with pytest.raises(StoppedError):
        train_pard(begun, stop_after(3))
    for source in ("dataset", "rollouts:every=3:share=1:temperature=0"):
        with pytest.raises(ValueError, match=r"belongs to another recipe: source was \{'name': 'rollouts', 'every': 2"):
            train_pard(begun.model_copy(update={"source": source}), lambda report: None)
    same = begun.model_copy(update={"source": "rollouts:share=1:temperature=0:every=2"})
    assert same.fingerprint == begun.fingerprint != recipe.fingerprint

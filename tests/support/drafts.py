"""What each drafter is given as its draft model beside the tiny target."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from filelock import FileLock

from paradraft.drafters import drafter_names, takes_draft
from paradraft.engine.loader import load
from paradraft.formats.head import WEIGHTS
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train import recipe_class, trainee_module, trainee_names
from paradraft.train.drafters.heads import HeadRecipe
from paradraft.train.drafters.pard2 import Pard2Recipe
from paradraft.train.run import launch

DRAFTERS = [*drafter_names(), "ngram+pard", "suffix+recycle"]
"""Every drafter, a union of chains, and a union whose parts estimate."""
FURTHER = {
    "eagle_parallel": {"previous_token_rank": 6, "target_layers": [1, -1]},
    "eagle": {"target_layers": [0, 2, -1]},
    "ppd": {"copies": 2, "aggregation": "mean", "lr": 0.1},
}
"""Settings with which some are trained here, so that nobody has to be tested twice."""
MOST_K = 9
"""The longest drafts that tests ask for."""
PROMPTS = ("a", "hello", "abcabcabc", "The0quick1brown", "xyz", "B5C6")


def draft_of(family: Path, name: str) -> str | None:
    """The folder that a drafter is loaded with; None for one without a draft model.

    A drafter on the target's states is trained for a second, on what the target says. The PARD folder is an ordinary
    causal LM too, so it serves all others.
    """
    if not takes_draft(name):
        return None
    reads_states = name in trainee_names() and issubclass(recipe_class(trainee_module(name)), HeadRecipe | Pard2Recipe)
    return str(_head(family, name) if reads_states else family / "pard")


@cache
def _head(family: Path, name: str) -> Path:
    folder = _shared(family) / f"head-{name}"
    with FileLock(folder.with_name(f"training-{name}.lock")):
        if not (folder / WEIGHTS).exists():
            train_head(family, name, folder, **FURTHER.get(name, {}))
    return folder


def _shared(family: Path) -> Path:
    """Processes of a test run have the same target, each in its own folder; what one has trained serves all."""
    return family.parent.parent if family.parent.name.startswith("popen-") else family


@cache
def _answers(family: Path) -> Path:
    """What the target says, to train on."""
    file = _shared(family) / "answers.jsonl"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            plain = load(str(family / "target"), runtime=Runtime(dtype="float64", compiled=False))
            prompts = [prompt for prompt in PROMPTS for _ in range(2)]
            samplings = [Sampling(), Sampling(temperature=0.7, seed=1)] * len(PROMPTS)
            answers = plain.generate(prompts, max_new_tokens=80, sampling=samplings)
            texts = [
                {"prompt": prompt, "response": answer.text} for prompt, answer in zip(prompts, answers, strict=True)
            ]
            file.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return file


def train_head(family: Path, name: str, folder: Path, **settings: object) -> None:
    """Trains a drafter on a target's states for a second.

    Args:
        family: has the target.
        name: of the drafter.
        folder: where it goes.
        settings: of the recipe.
    """
    module = trainee_module(name)
    kind = recipe_class(module)
    roles = {role: str(family / kind.ROLES[role]) for role in ("model", "teacher") if role in kind.ROLES}
    recipe = kind.model_validate(roles | {
        "data": [_answers(family)], "out": folder, "k": MOST_K, "steps": 24,
        "lr": 1e-2, "samples_per_step": 8, "max_length": 96, "bf16": False, "device": "cpu", "held_out": 0,
        "warmup_steps": 1,
    } | settings)  # fmt: skip
    launch.train(recipe, module.build, lambda report: None)
    assert (folder / WEIGHTS).exists()

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paradraft import load
from paradraft.models.loading import Runtime
from paradraft.train import trainer
from paradraft.train.data import Sample, load_samples
from paradraft.train.recipe import PardRecipe
from paradraft.train.trainer import Progress, is_trained, samples_of_step, train_pard
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer


def recipe_for(family: Path, folder: Path, **settings: object) -> PardRecipe:
    data = folder / "data.txt"
    folder.mkdir(exist_ok=True)
    data.write_text("helloworld" * 6 + "abcabcabc" * 4)
    defaults = {
        "steps": 5, "samples_per_step": 2, "k": 3, "max_length": 20, "lr": 3e-3, "warmup_steps": 2,
        "bf16": False, "log_every": 1, "save_every": 2, "optimizer": "muon",
    }  # fmt: skip
    given = {"model": str(family / "draft"), "data": [data], "out": folder / "out"}
    return PardRecipe(**{**given, **defaults, **settings})


class StoppedError(Exception):
    """What a test stops a run with."""


def stop_after(step: int) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.step == step:
            raise StoppedError

    return report


@pytest.mark.parametrize("settings", [{"optimizer": "muon"}, {"optimizer": "adamw", "bf16": True}])
def test_a_resumed_run_ends_with_the_same_weights(family: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Guards against a resumed run that repeats, skips or reorders steps, or forgets its momentum."""
    whole, stopped = (recipe_for(family, tmp_path / name, **settings) for name in ("whole", "stopped"))
    stopped = stopped.model_copy(update={"data": whole.data})
    expected: list[Progress] = []
    train_pard(whole, expected.append)
    with pytest.raises(StoppedError):
        train_pard(stopped, stop_after(3))
    assert not is_trained(stopped)
    resumed: list[Progress] = []
    train_pard(stopped, resumed.append)
    assert [progress.step for progress in resumed] == [3, 4, 5], "the last checkpoint was after step 2"
    # The written weights are rounded to bfloat16; the losses are not, and see every bit.
    assert [progress.loss for progress in resumed] == [progress.loss for progress in expected[2:]]
    ours, theirs = (load_file(recipe.out / "model.safetensors") for recipe in (stopped, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    start = load_file(family / "draft" / "model.safetensors")
    assert not any(torch.equal(ours[name], start[name].to(ours[name].dtype)) for name in ours), "everything has learnt"


def test_the_result_is_a_pard_drafter_and_an_ordinary_model(family: Path, tmp_path: Path) -> None:
    """Guards the folder that engines read: the keys of config.json, both ways to load it, and bf16 weights."""
    recipe = recipe_for(family, tmp_path, steps=2)
    train_pard(recipe, lambda progress: None)
    assert is_trained(recipe)
    config = json.loads((recipe.out / "config.json").read_text())
    assert (config["pard_token"], config["mask_token_id"], config["spd_type"]) == (VOCAB, VOCAB, "pard")
    model = AutoModelForCausalLM.from_pretrained(recipe.out)
    assert model.dtype == torch.bfloat16
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    target, exact = str(family / "target"), Runtime(dtype="float64", compiled=False)
    engine = load(target, drafter="pard", draft=str(recipe.out), k=3, runtime=exact)
    assert engine.drafter.mask_id == VOCAB
    plain = load(target, runtime=exact).generate("hello", max_new_tokens=12).tokens
    assert engine.generate("hello", max_new_tokens=12).tokens == plain


def test_k_of_one_trains_an_ordinary_draft(family: Path, tmp_path: Path) -> None:
    """Guards the ordinary drafts of a family: the loss is plain next-token cross-entropy, and no mask token appears."""
    recipe = recipe_for(family, tmp_path, k=1, steps=1, samples_per_step=1)
    reports: list[Progress] = []
    train_pard(recipe, reports.append)
    samples = load_samples(recipe.data, tiny_tokenizer(), max_length=recipe.max_length)
    (sample,) = samples_of_step(samples, recipe, 0)
    before = AutoModelForCausalLM.from_pretrained(family / "draft", dtype=torch.float32)
    tokens = torch.tensor([sample.tokens])
    assert reports[0].loss == pytest.approx(before(tokens, labels=tokens).loss.item(), abs=1e-6)
    config = json.loads((recipe.out / "config.json").read_text())
    assert not {"pard_token", "mask_token_id", "spd_type"} & config.keys()
    assert config["vocab_size"] == before.config.vocab_size


def test_training_lowers_the_loss_at_every_depth(family: Path, tmp_path: Path) -> None:
    """Guards against labels or masks that are shifted by one: ten-letter text must soon be predictable."""
    reports: list[Progress] = []
    recipe = recipe_for(family, tmp_path, steps=30, samples_per_step=4, log_every=10, lr=1e-2, muon_lr=3e-2)
    train_pard(recipe, reports.append)
    assert [progress.step for progress in reports] == [10, 20, 30]
    assert reports[-1].loss < reports[0].loss / 2
    assert len(reports[-1].accuracy) == 3 and min(reports[-1].accuracy) > 0.6


def test_a_teacher_is_learnt(family: Path, tmp_path: Path) -> None:
    """Guards distillation end to end: the drafter moves towards the teacher's probabilities, not the text's tokens."""
    teacher = tmp_path / "teacher"
    tiny_model(7).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    taught = recipe_for(family, tmp_path / "taught", teacher=str(teacher), steps=30, lr=1e-2, muon_lr=3e-2)
    alone = recipe_for(family, tmp_path / "alone", steps=30, lr=1e-2, muon_lr=3e-2)
    ids = torch.tensor([tiny_tokenizer()("helloworldhello")["input_ids"]])

    def answer(folder: Path | str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(ids).logits.detach().log_softmax(-1)

    def distance(folder: Path) -> float:
        expected = answer(teacher)
        return (expected.exp() * (expected - answer(folder))).sum(-1).mean().item()

    for recipe in (taught, alone):
        train_pard(recipe, lambda progress: None)
    before = distance(family / "draft")
    assert distance(taught.out) < before / 2 < before < distance(alone.out)


def test_a_run_goes_on_in_the_precision_it_began_with(family: Path, tmp_path: Path) -> None:
    """Guards against a run that is moved between machines with and without bf16 and changes midway without a word."""
    recipe = recipe_for(family, tmp_path, bf16=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "computes_bf16", lambda device: False)
        with pytest.raises(StoppedError):
            train_pard(recipe, stop_after(3))
        patch.setattr(trainer, "computes_bf16", lambda device: True)
        with pytest.raises(ValueError, match="began with bf16=False: go on with the same"):
            train_pard(recipe, lambda progress: None)


def test_another_recipe_does_not_go_on_from_this_one(family: Path, tmp_path: Path) -> None:
    """Guards against mixing two runs in one folder."""
    recipe = recipe_for(family, tmp_path)
    with pytest.raises(StoppedError):
        train_pard(recipe, stop_after(3))
    with pytest.raises(ValueError, match="belongs to another recipe"):
        train_pard(recipe.model_copy(update={"lr": 1e-5}), lambda progress: None)


def test_a_mask_token_that_occurs_in_the_data_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against a token that means both a letter and "predict here"."""
    with pytest.raises(ValueError, match="mask token 8 occurs in the data"):
        train_pard(recipe_for(family, tmp_path, mask_token_id=8), lambda progress: None)


def test_every_epoch_goes_through_all_samples_in_its_own_order() -> None:
    """Guards against samples never seen, and steps that straddle two epochs; step n never depends on step n - 1."""
    samples = [Sample(tokens=[i, i], is_label=[True, True]) for i in range(7)]
    recipe = PardRecipe(model="m", data=["d"], out="o", steps=9, samples_per_step=3)
    seen = [sample.tokens[0] for step in range(7) for sample in samples_of_step(samples, recipe, step)]
    epochs = [seen[start : start + 7] for start in range(0, 21, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1] != epochs[2]

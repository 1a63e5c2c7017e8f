"""What a training run refuses before its first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.train import memory
from paradraft.train.run import progress, setup
from paradraft.train.run.progress import Progress
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.training import prepare_pard, train_pard
from tests.unit.train.run.test_trainer import StoppedError, recipe_for, stop_after


def test_a_run_goes_on_in_the_precision_it_began_with(family: Path, tmp_path: Path) -> None:
    """Guards against a run that is moved between machines with and without bf16 and changes midway without a word."""
    recipe = recipe_for(family, tmp_path, bf16=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "computes_bf16", lambda device: False)
        with pytest.raises(StoppedError):
            train_pard(recipe, stop_after(3))
        patch.setattr(setup, "computes_bf16", lambda device: True)
        with pytest.raises(ValueError, match="began with bf16=false, and here it is not: set bf16=false"):
            train_pard(recipe, lambda progress: None)
        assert train_pard(recipe.model_copy(update={"bf16": False}), lambda progress: None)


def test_another_recipe_does_not_go_on_from_this_one(family: Path, tmp_path: Path) -> None:
    """Guards against mixing two runs in one folder."""
    recipe = recipe_for(family, tmp_path)
    with pytest.raises(StoppedError):
        train_pard(recipe, stop_after(3))
    with pytest.raises(ValueError, match="belongs to another recipe"):
        train_pard(recipe.model_copy(update={"lr": 1e-5}), lambda progress: None)


def test_two_runs_in_one_folder_are_refused(family: Path, tmp_path: Path) -> None:
    """Guards against two processes that delete each other's checkpoints; the second leaves the first alone, and a run
    that is over keeps nobody out."""
    recipe = recipe_for(family, tmp_path)
    refused: list[str] = []

    def start_another(progress: Progress) -> None:
        with pytest.raises(ValueError, match="is in use by another run") as error:
            train_pard(recipe, lambda report: None)
        refused.append(str(error.value))

    assert train_pard(recipe, start_another)
    assert len(refused) == 5 and str(recipe.out) in refused[0]
    assert not train_pard(recipe, lambda report: None), "it is trained"


def test_a_mask_token_that_occurs_in_the_data_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against a token that means both a separator and "predict here"."""
    folder = shutil.copytree(family / "draft", tmp_path / "draft")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|sep|>"]})
    tokenizer.save_pretrained(folder)
    recipe = recipe_for(family, tmp_path, model=str(folder), mask_token_id=VOCAB)
    (tmp_path / "data.txt").write_text("hello<|sep|>world")
    with pytest.raises(ValueError, match=f"mask token {VOCAB} occurs in the data"):
        train_pard(recipe, lambda progress: None)


def test_a_mask_token_that_ends_texts_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against hours of training a drafter with which answers never end: of the model, and of the target it is
    measured with."""
    with pytest.raises(ValueError, match=r"mask token 0 \(<\|eos\|>\) ends a text"):
        train_pard(recipe_for(family, tmp_path, mask_token_id=0), lambda progress: None)
    target = shutil.copytree(family / "target", tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, VOCAB + 2]}))
    recipe = recipe_for(family, tmp_path, mask_token_id=VOCAB + 2, target=str(target), held_out=1)
    with pytest.raises(ValueError, match=f"a drafter for '.*target': its mask token {VOCAB + 2}"):
        train_pard(recipe, lambda progress: None)


def test_a_variable_that_the_template_does_not_have_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against a recipe whose switch is misspelt, or gets lost on its way to the data."""
    recipe = recipe_for(family, tmp_path, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(ValueError, match="the model's chat template has no variable 'enable_thinkng'"):
        train_pard(recipe, lambda progress: None)


def test_samples_that_cannot_be_shared_are_a_mistake(family: Path, tmp_path: Path) -> None:
    """Guards against processes that wait for each other for ever, because one has a pass more."""
    recipe = recipe_for(family, tmp_path, samples_per_step=3)
    with pytest.raises(ValueError, match="samples_per_step=3 cannot be shared evenly by 2 processes: use 4"):
        prepare_pard(recipe, processes=2)


def test_a_run_that_does_not_fit_is_refused(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a process that is killed after an hour, or while it loads: memory is estimated before any weights
    are there."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1e6)
    recipe = recipe_for(family, tmp_path, max_length=97)
    with pytest.raises(
        ValueError, match=r"needs 0\.\d GiB \(models 0\.0, optimizer .*\), and 0\.0 GiB are free: lower"
    ):
        train_pard(recipe, lambda report: None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1e5)
    with pytest.raises(ValueError, match=r"0\.0 GiB are free: train adapters"):
        train_pard(recipe, lambda report: None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5e4)
    with pytest.raises(ValueError, match=r"0\.0 GiB are free: use smaller models"):
        train_pard(recipe, lambda report: None)
    assert not recipe.out.exists()


def test_processes_that_are_not_joined_are_refused(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against several processes that each train the whole run and write into one folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = recipe_for(family, tmp_path)
    with pytest.raises(ValueError, match="2 processes were started, and accelerate joined 1 of them on cpu: set"):
        train_pard(recipe, lambda report: None)
    assert not recipe.out.exists()


def test_files_of_something_else_are_not_touched(family: Path, tmp_path: Path) -> None:
    """Guards a project whose folder someone names as `out`: its own `checkpoint` folder would be deleted in the end."""
    recipe = recipe_for(family, tmp_path)
    mine = recipe.out / "checkpoint" / "mine.pt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ValueError, match="holds files of something else: choose another `out`"):
        train_pard(recipe, lambda report: None)
    assert [file for file in recipe.out.rglob("*") if file.is_file()] == [mine]
    with pytest.raises(ValueError, match="out: name a folder of its own"):
        recipe_for(family, tmp_path, out=Path())


@pytest.mark.parametrize("record", ["", "[]", "{}", "[" * 100_000])
def test_a_model_with_a_broken_record_is_not_touched(family: Path, tmp_path: Path, record: str) -> None:
    """Guards a trained folder whose record was damaged, and a start that would end in a traceback."""
    recipe = recipe_for(family, tmp_path)
    recipe.out.mkdir()
    (recipe.out / "config.json").write_text("mine")
    (recipe.out / "train_command.json").write_text(record)
    with pytest.raises(ValueError, match="holds a model of another recipe"):
        train_pard(recipe, lambda report: None)
    assert (recipe.out / "config.json").read_text() == "mine"


@pytest.mark.parametrize("role", ["model", "target"])
def test_a_model_without_a_row_for_a_token_is_refused(family: Path, tmp_path: Path, role: str) -> None:
    """Guards against an index error in the first step, or at the first evaluation."""
    tiny_model(1, rows=12).save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    settings = {"k": 1} if role == "model" else {"held_out": 2}
    recipe = recipe_for(family, tmp_path, **{role: str(tmp_path / "small")}, **settings)
    with pytest.raises(ValueError, match=rf"{role} '.*small' has an embedding of 12 rows, and the data holds token 23"):
        train_pard(recipe, lambda report: None)


def test_attention_that_cannot_learn_here_is_refused(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback out of the first backward pass where `device` is left to the machine."""
    with pytest.raises(ValueError, match="no backward pass on a CPU, use sdpa"):
        recipe_for(family, tmp_path, attention="flex_attention", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no backward pass on a CPU, use sdpa"):
        train_pard(recipe_for(family, tmp_path, attention="flex_attention", device="auto"), lambda report: None)


def test_a_target_that_does_not_fit_is_refused_before_the_first_step(family: Path, tmp_path: Path) -> None:
    """Guards hours of training: the first evaluation comes after a tenth of the steps."""
    with pytest.raises(ValueError, match="knows 72 tokens, the target 4088"):
        train_pard(recipe_for(family, tmp_path, target="pocket", held_out=2), lambda report: None)
    assert not (tmp_path / "out").exists()


def test_trackers_that_are_not_installed_are_named(family: Path, tmp_path: Path) -> None:
    """Guards against a run of days that was never logged: accelerate only warns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(progress.INSTALLED, "wandb", lambda: False)
        with pytest.raises(ValueError, match="wandb is not installed"):
            train_pard(recipe_for(family, tmp_path, report_to=["tensorboard", "wandb"]), lambda report: None)

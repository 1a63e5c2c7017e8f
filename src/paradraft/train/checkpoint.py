"""What a training run leaves on disk: always whole, whenever it is stopped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint in one move; a stop while writing leaves the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, file)


def load_state(file: Path, fingerprint: str) -> dict[str, Any] | None:
    """The last checkpoint of this run, or None.

    Raises:
        ValueError: the checkpoint belongs to another recipe.
    """
    if not file.exists():
        return None
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if state["fingerprint"] != fingerprint:
        raise ValueError(f"{file} belongs to another recipe: delete its folder, or choose another `out`")
    return state


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes an ordinary Hugging Face folder; `folder` appears or changes only when all is written."""
    folder = folder.resolve()
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    if not model.generation_config.do_sample:
        # Published models have sampling settings without `do_sample`, which `transformers` reads but does not write.
        try:
            model.generation_config.validate(strict=True)
        except ValueError:
            model.generation_config.do_sample = True
    try:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)

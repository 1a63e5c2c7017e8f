"""What a training run leaves on disk: always whole, whenever it is stopped."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE = "run.json"
"""Inside a checkpoint: which run and how far; written last, so a checkpoint without it is not whole."""


class Checkpoints:
    """The newest state of a run, in one folder; older ones go once a newer one is whole.

    Args:
        folder: where checkpoints live.
        accelerator: what holds model and optimizers, on one device or many.
        fingerprint: of the recipe.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, fingerprint: str) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self._fingerprint = fingerprint

    def save(self, step: int, **state: object) -> None:
        """Saves model, optimizers, and what else the run has to know to go on after a step."""
        place = self.folder / f"step-{step:08d}"
        if self._accelerator.is_main_process:
            shutil.rmtree(place, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(place), safe_serialization=False)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            known = {"fingerprint": self._fingerprint, "step": step, **state}
            new = place / f"{STATE}.new"
            new.write_text(json.dumps(known), encoding="utf-8")
            os.replace(new, place / STATE)
            for other in self.folder.glob("step-*"):
                if other != place:
                    shutil.rmtree(other, ignore_errors=True)

    def load(self) -> dict[str, Any] | None:
        """Brings model and optimizers back to the newest whole checkpoint.

        Returns:
            What `save` was told; None if there is no checkpoint.

        Raises:
            ValueError: it belongs to another recipe.
        """
        newest = self._newest()
        if newest is None:
            return None
        state: dict[str, Any] = json.loads((newest / STATE).read_text(encoding="utf-8"))
        self._accelerator.load_state(str(newest))
        return state

    def check(self) -> None:
        """Raises ValueError if there is a checkpoint of another recipe."""
        newest = self._newest()
        if newest is not None:
            found = json.loads((newest / STATE).read_text(encoding="utf-8"))["fingerprint"]
            if found != self._fingerprint:
                raise ValueError(
                    f"{newest} belongs to another recipe: delete {self.folder.parent}, or choose another `out`"
                )

    def _newest(self) -> Path | None:
        whole = [place for place in self.folder.glob("step-*") if (place / STATE).is_file()]
        return max(whole, default=None)

    def delete(self) -> None:
        """Deletes all checkpoints, and the folder if nothing else is in it."""
        for place in self.folder.glob("step-*"):
            shutil.rmtree(place, ignore_errors=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


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
        put_in_place(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Moves the files of a whole model folder into another, `config.json` last: it says that all others are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
        os.replace(file, folder / file.name)
    new.rmdir()

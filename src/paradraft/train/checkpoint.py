"""What a training run leaves on disk: always whole, whenever it is stopped.

    out/checkpoint/step-00000200/      weights and optimizers, and `run.json`, written last
    out/checkpoint/drafter-00000150/   a drafter that may be the result, as it would be shipped

A drafter is named after its step, and stays while the newest checkpoint calls it the best: a run that
goes on from there needs it, whatever it has found since.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.train.progress import Sums
from paradraft.train.standing import Standing, Worth

STATE = "run.json"
"""Inside a checkpoint: which run and how far; written last, so a checkpoint without it is not whole."""


@dataclass(frozen=True, kw_only=True)
class State:
    """How far a run is, beside its weights.

    Args:
        identity: of its recipe.
        step: steps done.
        bf16: whether its passes compute in bf16.
        standing: how its drafters stand.
        sums: what was not reported yet.
    """

    identity: dict[str, Any]
    step: int
    bf16: bool
    standing: Standing = field(default_factory=Standing)
    sums: Sums = field(default_factory=Sums)


class Checkpoints:
    """The newest state of a run, in one folder; older ones go once a newer one is whole.

    Args:
        folder: where checkpoints live.
        accelerator: what holds model and optimizers, on one device or many.
        identity: of the recipe.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, identity: dict[str, Any]) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self.identity = identity

    def state(self) -> State | None:
        """How far the newest whole checkpoint is; None if there is none.

        Raises:
            ValueError: it belongs to another recipe, or cannot be read.
        """
        newest = self._newest()
        if newest is None:
            return None
        try:
            state = TypeAdapter(State).validate_json((newest / STATE).read_bytes())
        except ValidationError:
            raise ValueError(f"{newest / STATE} cannot be read: delete {newest}, and the run starts again") from None
        for key in {**state.identity, **self.identity}:
            before, now = state.identity.get(key), self.identity.get(key)
            if before != now:
                raise ValueError(
                    f"{newest} belongs to another recipe: {key} was {before!r} and is {now!r} now; delete "
                    f"{self.folder.parent}, or choose another `out`"
                )
        return state

    def save(self, state: State) -> None:
        """Saves model, optimizers, and how far the run is."""
        place = self._place(state.step)
        if self._accelerator.is_main_process:
            shutil.rmtree(place, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(place), safe_serialization=False)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            new = place / f"{STATE}.new"
            new.write_text(json.dumps(asdict(state)), encoding="utf-8")
            os.replace(new, place / STATE)
            _delete_all_but({place}, self.folder.glob("step-*"))
            self.keep_drafters(state.standing.best)

    def load(self) -> State | None:
        """Brings model and optimizers back to the newest whole checkpoint.

        Returns:
            What `state` says.
        """
        state = self.state()
        if state is not None:
            self._accelerator.load_state(str(self._place(state.step)))
        return state

    def drafter(self, step: int) -> Path:
        """Where the drafter of a step is written."""
        return self.folder / f"drafter-{step:08d}"

    def keep_drafters(self, best: Worth | None) -> None:
        """Deletes all drafters but the best and the one that was the best at the newest checkpoint."""
        state = self.state()
        needed = (best, None if state is None else state.standing.best)
        kept = {self.drafter(worth.step) for worth in needed if worth is not None}
        _delete_all_but(kept, self.folder.glob("drafter-*"))

    def delete(self) -> None:
        """Deletes all checkpoints and drafters, and the folder if nothing else is in it."""
        _delete_all_but(set(), [*self.folder.glob("step-*"), *self.folder.glob("drafter-*")])
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _newest(self) -> Path | None:
        whole = [place for place in self.folder.glob("step-*") if (place / STATE).is_file()]
        return max(whole, default=None)


def _delete_all_but(kept: set[Path], folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


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
        # Safetensors are written for their owner alone, and a server is often another user.
        for file in new.glob("*.safetensors"):
            file.chmod((new / "config.json").stat().st_mode)
        put_in_place(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Moves the files of a whole model folder into another, `config.json` last: it says that all others are there."""
    files = [file.relative_to(new) for file in new.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda f: f == Path("config.json")):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new / file, folder / file)
    shutil.rmtree(new)

"""What a training run leaves on disk: always whole, whenever it is stopped.

    out/checkpoint/step-00000200/      weights and optimizers, and `run.json`: how far, and digests of all files
    out/checkpoint/step-00000100/      the one before, for when a disk has damaged the newest
    out/checkpoint/drafter-00000150/   a drafter that may be the result, as it would be shipped

A checkpoint is written under another name, forced to the disk and then renamed, so one that has its name is whole.
The digests say whether it still is when a run goes on from it.

A drafter is named after its step, and stays while a checkpoint calls it the best: a run that goes on from there needs
it, whatever it has found since.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from paradraft.digests import file_digest
from paradraft.files import sync, sync_entries
from paradraft.train.run.progress import BestSoFar, Score, Sums
from paradraft.train.run.provenance import Learnt


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, which need not exist.

    The lock is `<folder>.lock` beside it; the file stays, the lock goes with the process that holds it.

    Raises:
        ValueError: another run is in it.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use by another run: wait for it, or choose another `out`") from None
    try:
        yield
    finally:
        lock.release()


STATE = "run.json"
"""Inside a checkpoint: which run and how far, and digests."""
UNFINISHED = ".new"
"""The suffix of a folder that is being written."""


@dataclass(frozen=True, kw_only=True)
class State:
    """How far a run is, beside its weights.

    Args:
        identity: of its recipe.
        step: steps done.
        bf16: whether its passes compute in bf16.
        began: the day on which it began, as YYYY-MM-DD; chat templates write it.
        learnt: what it learns; None where it is not known.
        is_evaluated: False if the run was stopped between the step and an evaluation that follows it.
        standing: how its drafters stand.
        sums: what was not reported yet.
    """

    identity: dict[str, Any]
    step: int
    bf16: bool
    began: str = ""
    learnt: Learnt | None = None
    is_evaluated: bool = True
    standing: BestSoFar = field(default_factory=BestSoFar)
    sums: Sums = field(default_factory=Sums)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """What `run.json` holds.

    Args:
        state: how far the run is.
        digests: SHA-256 of all files of the checkpoint and of its best drafter, by their paths from the folder of all
            checkpoints.
    """

    state: State
    digests: dict[str, str]


class _DamagedError(Exception):
    """Says which file of a checkpoint is not as it was written."""


class Checkpoints:
    """The two newest states of a run, in one folder; older ones go once a newer one is whole.

    Args:
        folder: where checkpoints live.
        accelerator: what holds model and optimizers, on one device or many.
        identity: of the recipe.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, identity: dict[str, Any]) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self.identity = identity
        self._last: Path | None = None

    def state(self) -> State | None:
        """How far the newest checkpoint is that is not damaged; None if there is none.

        All its files are read. Warns of a newer one that is damaged.

        Raises:
            ValueError: it belongs to another recipe, or all are damaged.
        """
        damages: list[str] = []
        places = self._places()
        for place in reversed(places):
            try:
                written = _read(place)
                self._check_identity(place, written.state)
                self._check_digests(written)
            except _DamagedError as damage:
                damages.append(str(damage))
                continue
            for found in damages:
                warnings.warn(f"{found}: the run goes on from {place}", stacklevel=2)
            return written.state
        if damages:
            where = places[0] if len(places) == 1 else self.folder
            raise ValueError(f"{', '.join(damages)}: delete {where}, and the run starts again")
        return None

    def _check_identity(self, place: Path, state: State) -> None:
        for key in {**state.identity, **self.identity}:
            before, now = state.identity.get(key), self.identity.get(key)
            if before != now:
                raise ValueError(
                    f"{place} belongs to another recipe: {key} was {before!r} and is {now!r} now; delete "
                    f"{self.folder.parent}, or choose another `out`"
                )

    def _check_digests(self, written: _Written) -> None:
        for name, digest in written.digests.items():
            file = self.folder / name
            if not file.exists() and name.startswith("drafter-"):
                # A run that was stopped while it put the result in its place has moved some files already.
                file = self.folder.parent.joinpath(*Path(name).parts[1:])
            try:
                found = file_digest(file)
            except FileNotFoundError:
                raise _DamagedError(f"{self.folder / name} is missing") from None
            except OSError as error:
                raise _DamagedError(f"{file} cannot be read ({error.strerror})") from None
            if found != digest:
                raise _DamagedError(f"{file} is damaged (it is not what was written)")

    def save(self, state: State) -> None:
        """Saves model, optimizers, and how far the run is; returns when all of it is on the disk."""
        place = self._place(state.step)
        new = place.with_name(place.name + UNFINISHED)
        is_main = self._accelerator.is_main_process
        if is_main:
            shutil.rmtree(new, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        try:
            self._accelerator.save_state(str(new), safe_serialization=False)
            self._accelerator.wait_for_everyone()
            if is_main:
                self._seal(new, place, state)
        except BaseException:
            # Half a checkpoint is of no use, and would take the room that a full disk needs.
            if is_main:
                shutil.rmtree(new, ignore_errors=True)
            raise
        if is_main:
            kept = {place} if self._last is None else {place, self._last}
            _delete_all_but(kept, self.folder.glob("step-*"))
            self.keep_drafters(state.standing.best)
        self._last = place
        self._accelerator.wait_for_everyone()

    def _seal(self, new: Path, place: Path, state: State) -> None:
        """Writes the state and the digests, forces all of it to the disk, and gives the checkpoint its name."""
        digests = {f"{place.name}/{file.relative_to(new).as_posix()}": file_digest(file) for file in _files(new)}
        if state.standing.best is not None:
            drafter = self.drafter(state.standing.best.step)
            digests |= {file.relative_to(self.folder).as_posix(): file_digest(file) for file in _files(drafter)}
        written = _Written(state=state, digests=digests)
        (new / STATE).write_text(json.dumps(asdict(written)), encoding="utf-8")
        sync(new)
        _delete(place)
        os.replace(new, place)
        sync_entries(self.folder)

    def load(self, state: State) -> None:
        """Brings model and optimizers back to the checkpoint of a state that `state` found."""
        self._last = self._place(state.step)
        self._accelerator.load_state(str(self._last))

    def drafter(self, step: int) -> Path:
        """Where the drafter of a step is written."""
        return self.folder / f"drafter-{step:08d}"

    def keep_drafters(self, best: Score | None) -> None:
        """Deletes all drafters but the best and those that were the best at a checkpoint."""
        needed = [best]
        for place in self._places():
            try:
                needed.append(_read(place).state.standing.best)
            except _DamagedError:
                continue  # no run goes on from there
        kept = {self.drafter(worth.step) for worth in needed if worth is not None}
        _delete_all_but(kept, self.folder.glob("drafter-*"))

    def delete(self) -> None:
        """Deletes all checkpoints and drafters, and the folder if nothing else is in it."""
        _delete_all_but(set(), [*self.folder.glob("step-*"), *self.folder.glob("drafter-*")])
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _places(self) -> list[Path]:
        """All checkpoints that were written to their end, the oldest first."""
        places = (place for place in self.folder.glob("step-*") if place.suffix != UNFINISHED)
        return sorted(place for place in places if (place / STATE).is_file())


def _read(place: Path) -> _Written:
    try:
        return TypeAdapter(_Written).validate_json((place / STATE).read_bytes())
    except (ValidationError, OSError):
        raise _DamagedError(f"{place / STATE} cannot be read") from None


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _delete_all_but(kept: set[Path], folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder not in kept:
            _delete(folder)


def _delete(folder: Path) -> None:
    # A checkpoint without its state is none, and not a damaged one, if this is stopped halfway.
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

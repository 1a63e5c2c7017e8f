"""Checkpoints of a training run, written atomically.

    out/checkpoint/step-00000200/      weights and optimizers, and `run.json`: progress, and digests of all files
    out/checkpoint/step-00000100/      the previous one, in case a disk has damaged the newest
    out/checkpoint/drafter-00000150/   the best drafter, as it would be shipped

A checkpoint is written under a temporary name, synced and then renamed, so it is complete once it has its name. A
resumed run checks the digests.

A drafter is named after its step, and is kept while it is the best of a checkpoint: a run that resumes from there
needs it, even if a later drafter was better.
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
from paradraft.train.recipe import STATES
from paradraft.train.run.progress import BestSoFar, Score, Sums
from paradraft.train.run.provenance import Learnt


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Locks a folder, which need not exist, against other runs.

    The lock file `<folder>.lock` stays; the lock ends with the process that holds it.

    Raises:
        ValueError: another run holds the lock.
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
"""File in a checkpoint: identity and progress of the run, and digests."""
UNFINISHED = ".new"
"""Suffix of a folder that is being written."""


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a run, except weights and optimizers.

    Args:
        identity: of its recipe.
        began: first day of the run, as YYYY-MM-DD; chat templates write it.
        learnt: description of the samples, if known.
        is_evaluated: False if the run was stopped between the step and the evaluation after it.
        standing: scores of its drafters.
        sums: statistics since the last report.
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
    """Content of `run.json`.

    Args:
        state: of the run.
        digests: SHA-256 of all files of the checkpoint and its best drafter, by path relative to the folder of all
            checkpoints.
    """

    state: State
    digests: dict[str, str]


class _DamagedError(Exception):
    """Names the damaged file of a checkpoint."""


class Checkpoints:
    """The two newest checkpoints of a run in a folder; older ones are deleted after a newer one is complete."""

    def __init__(self, folder: Path, accelerator: Accelerator, identity: dict[str, Any]) -> None:
        self.folder = folder
        self._accelerator = accelerator
        self.identity = identity
        self._last: Path | None = None

    def state(self) -> State | None:
        """Returns the state of the newest undamaged checkpoint; None if there is no checkpoint.

        Reads all its files, and warns of newer ones that are damaged.

        Raises:
            ValueError: it belongs to another recipe, or all are damaged.
        """
        damages: list[str] = []
        checkpoints = self._checkpoints()
        for checkpoint in reversed(checkpoints):
            try:
                written = _read(checkpoint)
                self._check_identity(checkpoint, written.state)
                self._check_digests(written)
            except _DamagedError as error:
                damages.append(str(error))
                continue
            for damage in damages:
                warnings.warn(f"{damage}: the run goes on from {checkpoint}", stacklevel=2)
            return written.state
        if damages:
            folder = checkpoints[0] if len(checkpoints) == 1 else self.folder
            raise ValueError(f"{', '.join(damages)}: delete {folder}, and the run starts again")
        return None

    def _check_identity(self, checkpoint: Path, state: State) -> None:
        for key in {**state.identity, **self.identity}:
            before, now = state.identity.get(key), self.identity.get(key)
            if before != now:
                raise ValueError(
                    f"{checkpoint} belongs to another recipe: {key} was {before!r} and is {now!r} now; delete "
                    f"{self.folder.parent}, or choose another `out`"
                )

    def _check_digests(self, written: _Written) -> None:
        for name, digest in written.digests.items():
            file = self.folder / name
            if not file.exists() and name.startswith("drafter-"):
                # A run that was stopped while it moved the result into `out` has moved some files already.
                file = self.folder.parent.joinpath(*Path(name).parts[1:])
            try:
                actual = file_digest(file)
            except FileNotFoundError:
                raise _DamagedError(f"{self.folder / name} is missing") from None
            except OSError as error:
                raise _DamagedError(f"{file} cannot be read ({error.strerror})") from None
            if actual != digest:
                raise _DamagedError(f"{file} is damaged (it is not what was written)")

    def save(self, state: State) -> None:
        """Saves model, optimizers and state, and syncs them to the disk."""
        checkpoint = self._checkpoint(state.step)
        new = checkpoint.with_name(checkpoint.name + UNFINISHED)
        is_main = self._accelerator.is_main_process
        if is_main:
            shutil.rmtree(new, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        try:
            self._accelerator.save_state(str(new), safe_serialization=False)
            self._accelerator.wait_for_everyone()
            if is_main:
                self._seal(new, checkpoint, state)
        except BaseException:
            # An incomplete checkpoint is useless, and the disk may be full.
            if is_main:
                shutil.rmtree(new, ignore_errors=True)
            raise
        if is_main:
            kept = {checkpoint} if self._last is None else {checkpoint, self._last}
            _delete_all_but(kept, self.folder.glob("step-*"))
            self.keep_drafters(state.standing.best)
        self._last = checkpoint
        self._accelerator.wait_for_everyone()

    def _seal(self, new: Path, checkpoint: Path, state: State) -> None:
        """Writes state and digests, syncs the checkpoint, and renames it."""
        digests = {f"{checkpoint.name}/{file.relative_to(new).as_posix()}": file_digest(file) for file in _files(new)}
        if state.standing.best is not None:
            drafter = self.drafter(state.standing.best.step)
            digests |= {file.relative_to(self.folder).as_posix(): file_digest(file) for file in _files(drafter)}
        written = _Written(state=state, digests=digests)
        (new / STATE).write_text(json.dumps(asdict(written)), encoding="utf-8")
        sync(new)
        _delete(checkpoint)
        os.replace(new, checkpoint)
        sync_entries(self.folder)

    def load(self, state: State) -> None:
        """Restores model and optimizers from the checkpoint whose state `state` returned."""
        self._last = self._checkpoint(state.step)
        self._accelerator.load_state(str(self._last))

    def drafter(self, step: int) -> Path:
        """Folder of the drafter of a step."""
        return self.folder / f"drafter-{step:08d}"

    def keep_drafters(self, best: Score | None) -> None:
        """Deletes all drafters except the best one and those that were the best at a checkpoint."""
        needed = [best]
        for checkpoint in self._checkpoints():
            try:
                needed.append(_read(checkpoint).state.standing.best)
            except _DamagedError:
                continue  # no run resumes from there
        kept = {self.drafter(score.step) for score in needed if score is not None}
        _delete_all_but(kept, self.folder.glob("drafter-*"))

    def delete(self) -> None:
        """Deletes all checkpoints and drafters, and the folder if it is empty then."""
        _delete_all_but(set(), [*self.folder.glob("step-*"), *self.folder.glob("drafter-*"), *self.folder.glob(STATES)])
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _checkpoint(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _checkpoints(self) -> list[Path]:
        """All complete checkpoints, the oldest first."""
        folders = (folder for folder in self.folder.glob("step-*") if folder.suffix != UNFINISHED)
        return sorted(folder for folder in folders if (folder / STATE).is_file())


def _read(checkpoint: Path) -> _Written:
    try:
        return TypeAdapter(_Written).validate_json((checkpoint / STATE).read_bytes())
    except (ValidationError, OSError):
        raise _DamagedError(f"{checkpoint / STATE} cannot be read") from None


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _delete_all_but(kept: set[Path], folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder not in kept:
            _delete(folder)


def _delete(folder: Path) -> None:
    # The state goes first: without it, a half-deleted folder counts as no checkpoint, not as a damaged one.
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

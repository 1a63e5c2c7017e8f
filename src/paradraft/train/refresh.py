"""Lets a trained drafter go on learning from a log of rounds.

A refresh trains the drafter a little on the newest answers, and replaces it only if the newest held-out answers are
guessed better (online speculative decoding, Liu et al. 2023, arXiv:2310.07177, with all tokens of the answers as labels
and not only those that were refused).

    out/newest.json     the drafter to decode with, and how much of the log is learnt
    out/refresh-0003/   the last two drafters that were better
    out/answers/        the data of the refresh under way
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paradraft.data.newest_answers import FEWEST, MOST, PIECE, LoggedAnswer, newest_lines, split, written
from paradraft.digests import model_digest
from paradraft.engine.automatic import drafter_of
from paradraft.files import write_output
from paradraft.sources.loading import locate
from paradraft.train import recipe_class, trainee_module, trainee_names
from paradraft.train.recipe import Recipe
from paradraft.train.recipe_file import recipe_of
from paradraft.train.run import launch
from paradraft.train.run.checkpoint import exclusive
from paradraft.train.run.progress import Report, Score
from paradraft.train.run.provenance import RECORD, read_record
from paradraft.wording import number_of

NEWEST, ANSWERS, FOLDER = "newest.json", "answers", re.compile(r"refresh-\d+")
LOCK, LOG, OUTPUT = "adapt.lock", "rounds.jsonl", "adapt.log"
"""The lock on `out`, and files that a server has there: the answers, and the output of the process that refreshes."""
BESIDE = (LOCK, LOG, f"{LOG}.1", OUTPUT)
"""Files in `out` beside which a new adaptation may begin."""
EPOCHS = 4
"""Times that an answer is learnt, over all refreshes."""
RATE = 0.5
"""Of the learning rates of the drafter's own training."""
NEVER = 10**9
"""Steps between two evaluations besides the first and the last."""
ENDS_WITH_INPUT = "PARADRAFT_ADAPT_ENDS_WITH_INPUT"
"""Variable of the environment of a `paradraft adapt` that ends when its standard input does."""
OF_A_MACHINE = ("device", "attention", "bf16")
"""Settings of the machine that trained the drafter, which have their defaults again."""


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """The result of a refresh.

    Args:
        number: from 1 on.
        before, after: scores of the drafter that it began with, and of the better one.
        held_out: number of the answers that measure.
    """

    number: int
    before: Score
    after: Score
    held_out: int

    @property
    def is_better(self) -> bool:
        """Whether it has changed the drafter."""
        return self.after.step > 0

    @property
    def in_words(self) -> str:
        """One line for the user."""
        before, of = _score_in_words(self.before), f"on {number_of(self.held_out, 'held-out answer')}"
        if not self.is_better:
            return f"refresh {self.number} is not better than {before} {of}"
        return f"refresh {self.number} is better: {before} before it, {_score_in_words(self.after)} now, {of}"


def _score_in_words(score: Score) -> str:
    length = "" if score.acceptance_length is None else f"{score.acceptance_length:.3f} tokens per target pass and "
    return f"{length}a loss of {score.held_out_loss:.3f}"


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The content of `newest.json`.

    Args:
        initial: digest of the drafter that the first refresh began with.
        drafter: name of the folder to decode with; None for the initial one.
        read: bytes of the log before the first answer that no refresh has seen.
        last: the last refresh, better or not.
    """

    initial: str
    drafter: str | None = None
    read: int = 0
    last: Refresh | None = None


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What is refreshed, and how.

    Args:
        drafter: folder that `paradraft train` wrote.
        log: file that `--rounds` writes; it may be written meanwhile.
        out: folder for the refreshed drafters; of an earlier adaptation of the same drafter it goes on.
        target: that the drafter drafts for; by default the one of its training.
        refresh_every: new answers that a refresh waits for.
        window: number of the newest answers that it learns and measures.
        settings: `key=value` overrides of the training recipe.

    Raises:
        ValueError: the folder has no drafter that a recipe trained, a setting is wrong, a model of the recipe is
            missing, or `out` holds something else.
    """

    drafter: Path
    log: Path
    out: Path
    target: str | None = None
    refresh_every: int = 64
    window: int = 256
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.refresh_every < FEWEST:
            raise ValueError(f"refresh_every={self.refresh_every}: a refresh needs at least {FEWEST} new answers")
        if self.window < self.refresh_every:
            raise ValueError(f"window={self.window}: use at least the {self.refresh_every} that a refresh waits for")
        if not isinstance(read_record(self.drafter).get("recipe"), dict):
            raise ValueError(
                f"{str(self.drafter)!r} has no {RECORD} with its recipe: name a drafter that paradraft train has made"
            )
        if not (self.out / NEWEST).exists() and _is_of_others(self.out):
            raise ValueError(f"{str(self.out)!r} holds files of something else: choose another folder")
        if self.newest.initial != model_digest(self.drafter):
            raise ValueError(f"{str(self.out)!r} has refreshes of another drafter: choose another folder")
        recipe = self._recipe()
        for role, shipped in recipe.ROLES.items():
            if (name := getattr(recipe, role)) is not None:
                locate(name, shipped)

    @property
    def newest(self) -> Newest:
        """The state so far; raises ValueError if its file is damaged."""
        if not (file := self.out / NEWEST).exists():
            return Newest(initial=model_digest(self.drafter))
        try:
            return TypeAdapter(Newest).validate_json(file.read_bytes())
        except (OSError, ValidationError):
            raise ValueError(f"{file} cannot be read: delete {str(self.out)!r}, or choose another folder") from None

    def folder_of(self, newest: Newest) -> Path:
        """Folder of the drafter to decode with."""
        return self.drafter if newest.drafter is None else self.out / newest.drafter

    @property
    def waiting(self) -> int:
        """Number of answers that no refresh has seen."""
        if not self.log.exists():
            return 0
        read = self.newest.read
        with self.log.open("rb") as log:
            log.seek(read if read <= self.log.stat().st_size else 0)  # else the log has begun anew
            return sum(piece.count(b"\n") for piece in iter(lambda: log.read(PIECE), b""))

    def check_log(self) -> None:
        """Raises ValueError if there are too few answers for a refresh."""
        if not self.log.exists():
            raise ValueError(f"log={str(self.log)!r} does not exist")
        split(self._fitting(newest_lines(self.log, self.window)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks `out`, which it makes, for refreshes; users' texts in it are deleted at the end.

        Raises:
            ValueError: another process refreshes the drafters in it.
            OSError: it cannot be written.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with exclusive(self.out / Path(LOCK).stem):
            self._write(self.newest)
            self.tidy()
            try:
                yield
            finally:
                self.tidy()

    def tidy(self) -> None:
        """Deletes what a refresh under way has written."""
        last = self.newest.last
        folder = self._refresh_folder(1 if last is None else last.number + 1)
        for unfinished in (self.out / ANSWERS, folder):
            shutil.rmtree(unfinished, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)

    def refresh(self, report: Callable[[Report], None], announce: Callable[[str], None]) -> Refresh:
        """Trains on the newest answers, and keeps the drafter or replaces it; `out` is `locked`.

        Raises:
            ValueError, OSError, StoppedError: see `paradraft.train.run.launch.train`; the state stays. There are too
                few answers, or too few different ones.
        """
        before = self.newest
        number = 1 if before.last is None else before.last.number + 1
        folder, read = self._refresh_folder(number), self.log.stat().st_size
        try:
            learnt, held_out = split(self._fitting(newest_lines(self.log, self.window)))
            announce(f"refresh {number} learns {len(learnt)} answers, and is measured with {len(held_out)} others")
            recipe = self._recipe(number, written(self.out / ANSWERS, learnt, held_out))
            launch.train(recipe, trainee_module(self._trainee).build, report, announce=announce)
            record = read_record(folder)
        except BaseException:
            self.tidy()
            raise
        before_it, after_it = map(TypeAdapter(Score).validate_python, (record["before_training"], record["best"]))
        result = Refresh(number=number, before=before_it, after=after_it, held_out=len(held_out))
        drafter = folder.name if result.is_better else before.drafter
        self._write(replace(before, drafter=drafter, read=read, last=result))
        in_use = {before.drafter, drafter}  # a server may be reading the one before
        for other in self.out.iterdir():
            if FOLDER.fullmatch(other.name) and other.name not in in_use:
                shutil.rmtree(other, ignore_errors=True)
        shutil.rmtree(self.out / ANSWERS, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
        return result

    def _refresh_folder(self, number: int) -> Path:
        return self.out / f"refresh-{number:04d}"

    def _write(self, newest: Newest) -> None:
        write_output(self.out / NEWEST, TypeAdapter(Newest).dump_json(newest))

    def _fitting(self, lines: list[bytes]) -> list[LoggedAnswer]:
        """Those whose prompts leave room for an answer, both in training and where lengths are measured."""
        read = [line for line in map(LoggedAnswer.of, lines) if line is not None]
        if len(read) < len(lines):
            warnings.warn(
                f"{self.log} has {number_of(len(lines) - len(read), 'line')} of no log of rounds", stacklevel=3
            )
        recipe = self._recipe()
        most = recipe.max_length - min(recipe.answer_tokens, recipe.max_length // 2)
        return [line for line in read if len(line.prompt) <= most]

    @property
    def _trainee(self) -> str:
        record = read_record(self.drafter)
        for name in trainee_names():
            kind = recipe_class(trainee_module(name))
            if record.get("kind", kind.__name__) != kind.__name__:
                continue
            if "kind" in record or _drafts_as(name, kind, record["recipe"]) == drafter_of(str(self.drafter)):
                return name
        raise ValueError(f"{str(self.drafter)!r} was trained by something that is not installed: train another one")

    def _recipe(self, number: int = 1, data: Sequence[Mapping[str, Any] | str] = ()) -> Recipe:
        """Of a refresh; without its data to learn about its settings."""
        settings = read_record(self.drafter)["recipe"]
        kind = recipe_class(trainee_module(self._trainee))
        own = {name: value for name, value in _known(kind, settings).items() if name not in OF_A_MACHINE}
        steps = math.ceil(self.refresh_every * EPOCHS / settings["samples_per_step"])
        rates = ("lr", "muon_lr") if settings["optimizer"] == "muon" else ("lr",)
        fixed = {
            "data": list(data) or [str(self.log)], "out": str(self._refresh_folder(number)), "columns": {},
            "source": "dataset", "epochs": None,
            "held_out": None, "evaluate_every": NEVER, "patience": None, "report_to": [],
            **kind.continuing(settings, str(self.folder_of(self.newest)), self.target),
        }  # fmt: skip
        usual = {name: RATE * settings[name] for name in rates} | {
            "steps": steps, "warmup_steps": min(settings["warmup_steps"], steps // 4), "seed": number, "prompts": MOST,
        }  # fmt: skip
        for setting in self.settings:
            if (key := setting.partition("=")[0]) in fixed:
                raise ValueError(f"{setting!r}: a refresh sets {key} itself, leave it out")
        return recipe_of(kind, own | usual | fixed, self.settings)


def _is_of_others(folder: Path) -> bool:
    if not folder.is_dir():
        return folder.exists()
    return any(file.name not in BESIDE for file in folder.iterdir())


def _known(kind: type[Recipe], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that are no defaults; a record of an earlier version may have others."""
    fields = kind.model_fields
    return {name: value for name, value in settings.items() if name in fields and value != fields[name].default}


def _drafts_as(name: str, kind: type[Recipe], settings: dict[str, Any]) -> str | None:
    """The drafter that decodes with a recipe's result; None if the settings are of another kind."""
    try:
        return recipe_of(kind, _known(kind, settings), ()).decoded_with(name)[0]
    except ValueError:
        return None

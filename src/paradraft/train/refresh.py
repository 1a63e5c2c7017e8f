"""Lets a trained drafter go on learning from a log of rounds.

A refresh trains the drafter a little on the newest answers, and replaces it only if the newest held-out answers are
guessed better (online speculative decoding, Liu et al. 2023, arXiv:2310.07177, with all tokens of the answers as labels
and not only those that were refused).

    out/newest.json     the drafter to decode with, and how much of the log is learnt
    out/refresh-0003/   the last two drafters that were better
    out/answers/        what a refresh learns and what it is measured with; deleted after it
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paradraft.data.tokens.token_cache import SMALL_BYTES
from paradraft.digests import model_digest
from paradraft.engine.automatic import drafter_of
from paradraft.files import write_output
from paradraft.train import recipe_class, trainee_module, trainee_names
from paradraft.train.recipe import Recipe
from paradraft.train.recipe_file import recipe_of
from paradraft.train.run import launch
from paradraft.train.run.checkpoint import exclusive
from paradraft.train.run.progress import Report, Score
from paradraft.train.run.provenance import RECORD, read_record
from paradraft.wording import number_of

NEWEST = "newest.json"
ONE_IN, LEAST, MOST = 6, 6, 32
"""The answers to one in `ONE_IN` prompts are held out: at least `LEAST`, of which the newest `MOST` measure."""
ONE_IN_FEW = 4
FEWEST = ONE_IN_FEW * LEAST
"""Answers of the smallest refresh."""
EPOCHS = 4
"""Times that an answer is learnt, over all refreshes."""
RATE = 0.5
"""Of the learning rates of the drafter's own training."""
NEVER = 10**9
"""Steps between two evaluations besides the first and the last."""
PIECE = 2**20
"""Bytes read at once from the end of a log."""


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
        return f"refresh {self.number} drafts from now on: {before} before it, {_score_in_words(self.after)} now, {of}"


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
        every: new answers that a refresh waits for.
        window: number of the newest answers that it learns and measures.
        settings: `key=value` overrides of the training recipe.

    Raises:
        ValueError: the folder has no drafter, or none that a recipe trained, or `out` is of another one.
    """

    drafter: Path
    log: Path
    out: Path
    every: int = 64
    window: int = 256
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.every < FEWEST:
            raise ValueError(f"every={self.every}: a refresh needs at least {FEWEST} new answers")
        if self.window < self.every:
            raise ValueError(f"window={self.window}: use at least the {self.every} answers that a refresh waits for")
        if not isinstance(read_record(self.drafter).get("recipe"), dict):
            raise ValueError(
                f"{str(self.drafter)!r} has no {RECORD} with its recipe: name a drafter that paradraft train has made"
            )
        if self.newest.initial != model_digest(self.drafter):
            raise ValueError(f"{str(self.out)!r} has refreshes of another drafter: choose another folder")

    @property
    def newest(self) -> Newest:
        """The state so far; raises ValueError if its file is damaged."""
        if not (file := self.out / NEWEST).exists():
            return Newest(initial=model_digest(self.drafter))
        try:
            return TypeAdapter(Newest).validate_json(file.read_bytes())
        except (OSError, ValidationError):
            raise ValueError(f"{file} cannot be read: delete {str(self.out)!r}, or choose another folder") from None

    @property
    def current(self) -> Path:
        """Folder of the drafter to decode with."""
        return self.drafter if self.newest.drafter is None else self.out / self.newest.drafter

    @property
    def waiting(self) -> int:
        """Number of answers that no refresh has seen."""
        if not self.log.exists():
            return 0
        with self.log.open("rb") as log:
            log.seek(_seen(self.newest.read, self.log))
            return sum(piece.count(b"\n") for piece in iter(lambda: log.read(PIECE), b""))

    def refresh(self, report: Callable[[Report], None], announce: Callable[[str], None]) -> Refresh:
        """Trains on the newest answers, and keeps the drafter or replaces it.

        Raises:
            ValueError, OSError, StoppedError: see `paradraft.train.run.launch.train`; the state stays.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with exclusive(self.out):
            return self._refresh(report, announce)

    def _refresh(self, report: Callable[[Report], None], announce: Callable[[str], None]) -> Refresh:
        before = self.newest
        number = 1 if before.last is None else before.last.number + 1
        folder, answers = self.out / f"refresh-{number:04d}", self.out / "answers"
        _forget(folder, answers)  # of a refresh that was stopped
        read = self.log.stat().st_size
        learnt, held_out = split(newest_lines(self.log, self.window))
        announce(f"refresh {number}: {len(learnt)} answers are learnt, {len(held_out)} others measure")
        try:
            recipe, module = self._recipe(number, folder, _written(answers, learnt, held_out))
            launch.train(recipe, module.build, report, announce=announce)
            record = read_record(folder)
        except BaseException:
            _forget(folder)
            raise
        finally:
            _forget(answers)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
        before_it, after_it = map(TypeAdapter(Score).validate_python, (record["before_training"], record["best"]))
        result = Refresh(number=number, before=before_it, after=after_it, held_out=len(held_out))
        drafter = folder.name if result.is_better else before.drafter
        newest = replace(before, drafter=drafter, read=read, last=result)
        write_output(self.out / NEWEST, TypeAdapter(Newest).dump_json(newest))
        in_use = {before.drafter, drafter}  # a server may be reading the one before
        _forget(*(old for old in self.out.glob("refresh-*[0-9]") if old.name not in in_use))
        return result

    def _recipe(self, number: int, folder: Path, data: list[dict[str, Any]]) -> tuple[Recipe, ModuleType]:
        record = read_record(self.drafter)
        module = trainee_of(self.drafter, record)
        kind = recipe_class(module)
        fields, settings = kind.model_fields, record["recipe"]
        # A record of an earlier version may have other settings.
        own = {name: value for name, value in settings.items() if name in fields and value != fields[name].default}
        steps = math.ceil(self.every * EPOCHS / settings["samples_per_step"])
        rates = ("lr", "muon_lr") if settings["optimizer"] == "muon" else ("lr",)
        changed = {name: RATE * settings[name] for name in rates} | {
            "data": data, "columns": {}, "source": "dataset", "out": str(folder), "seed": number,
            "steps": steps, "epochs": None, "warmup_steps": min(settings["warmup_steps"], steps // 4),
            "held_out": None, "prompts": MOST, "evaluate_every": NEVER, "patience": None, "report_to": [],
        }  # fmt: skip
        return recipe_of(kind, own | changed | kind.continuing(str(self.current)), self.settings), module


def trainee_of(folder: Path, record: dict[str, Any]) -> ModuleType:
    """The module that trained the drafter in a folder; raises ValueError if it is not installed."""
    names = trainee_names()
    if "kind" not in record:  # of an earlier version
        names = [drafter_of(str(folder))]
    for module in map(trainee_module, names):
        if recipe_class(module).__name__ == record.get("kind", recipe_class(module).__name__):
            return module
    raise ValueError(f"{str(folder)!r}: there is no training with a {record['kind']}, install what has trained it")


def newest_lines(log: Path, most: int) -> list[bytes]:
    """The last whole lines of a log, the newest last."""
    start = size = log.stat().st_size
    lines: list[bytes] = []
    with log.open("rb") as file:
        while start and len(lines) <= most:
            start = max(min(size - PIECE, 2 * start - size), 0)
            file.seek(start)
            lines = file.read(size - start).splitlines(keepends=True)[start > 0 :]
    return [line for line in lines if line.endswith(b"\n")][-most:]


def split(lines: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Answers to learn, and held-out ones, the newest first.

    A prompt is always on the same side, so that what measures a refresh was learnt by none before it; where there are
    few prompts, every `ONE_IN_FEW`th answer is held out.

    Raises:
        ValueError: a line is of no log of rounds, or there are too few.

    >>> lines = [b'{"tokens": [%d, 5], "prompt_tokens": 1}' % prompt for prompt in range(100)]
    >>> learnt, held_out = split(lines)
    >>> len(learnt), len(held_out), len({*learnt, *held_out})
    (87, 13, 100)
    """
    if len(lines) < FEWEST:
        raise ValueError(f"the log has {number_of(len(lines), 'answer')}, and a refresh needs {FEWEST}: wait for more")
    aside = [_is_held_out(line) for line in lines]
    if not LEAST <= sum(aside) <= len(lines) // 2:
        aside = [index % ONE_IN_FEW == 0 for index in range(len(lines))]
    held_out = [line for line, is_aside in zip(lines, aside, strict=True) if is_aside]
    return [line for line, is_aside in zip(lines, aside, strict=True) if not is_aside], held_out[: -MOST - 1 : -1]


def _is_held_out(line: bytes) -> bool:
    try:
        record = json.loads(line)
        prompt = json.dumps(record["tokens"][: int(record["prompt_tokens"])])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"the log has a line that --rounds does not write: {line[:60]!r}") from None
    return zlib.crc32(prompt.encode()) % ONE_IN == 0


def _written(folder: Path, learnt: list[bytes], held_out: list[bytes]) -> list[dict[str, Any]]:
    """The two as data of a recipe, in files for their owner alone: users wrote them.

    The files are small, so that no token cache keeps them.
    """
    folder.mkdir(mode=0o700)
    sources: list[dict[str, Any]] = []
    for lines, weight in ((learnt, 1), (held_out, 0)):
        ends = accumulate(map(len, lines))
        for _, part in groupby(zip(lines, ends, strict=True), key=lambda line: line[1] // (SMALL_BYTES // 2)):
            file = folder / f"{len(sources)}.jsonl"
            file.write_bytes(b"".join(line for line, _ in part))
            sources.append({"path": str(file), "weight": weight})
    return sources


def _seen(read: int, log: Path) -> int:
    """Bytes that were read of a log; none of one that has begun anew."""
    return read if read <= log.stat().st_size else 0


def _forget(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

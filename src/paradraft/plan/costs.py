"""How long rounds take, by batch size, kind of draft and its length: measured in real rounds on real prompts.

A round is timed as the decoding loop itself times it: what the drafter does, the target's pass over K + 1 tokens of
each row with the verdict, and the rest. Lengths and kinds take turns, so that a slow moment of the machine and the
growing text hit all of them alike. The first round after a change of length is not counted (docs/decisions.md, 28).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.engine.engine import Engine
from paradraft.engine.request import requests_of
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree

COUNTED = 2
"""Rounds of one length that are counted before the next has its turn."""
VISITS = 5
"""Least turns of every length."""
LEAST_TURNS = 2
"""Least answers of every engine."""
LEAST_S = 5.0
"""Seconds for which the rounds of a batch size are timed at least; of fast models a few answers say little."""
FUTILE = 20
"""Answers in a row that may count nothing before it is given up, as long as there is not enough."""


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Seconds of one round.

    Args:
        draft_s: everything the drafter does before the target's pass.
        verify_s: the target's pass and the verdict.
        other_s: the rest.
    """

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """The whole round."""
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one engine's rounds take with one batch size.

    Args:
        rounds: by the number of tokens drafted, a typical round.
        prefill_s: reading the prompts, for the whole batch.
        draft_prefill_s: what the first draft takes longer than others: the drafter reads the prompts.
    """

    rounds: dict[int, RoundTime]
    prefill_s: float
    draft_prefill_s: float


class Rotation(Fixed):
    """Drafts every length in turn; `is_counted` says whether the round just asked for is worth its time.

    Args:
        ks: the lengths, at least one.
    """

    def __init__(self, ks: tuple[int, ...]) -> None:
        super().__init__(ks[0])
        self.ks = ks
        self._turn = 0
        self._rounds = self._useful = 0

    @property
    def is_counted(self) -> bool:
        """Whether this is not the first round of a turn or of a batch."""
        return self._rounds > 1

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """A new batch: its first round reads prompts."""
        super().start(tree, is_ragged=is_ragged)
        self._rounds = 0

    def next(self) -> list[int]:
        """The length whose turn it is."""
        if self._useful == COUNTED:
            self._turn += 1
            self._rounds = self._useful = 0
        self._rounds += 1
        self.k = self.ks[self._turn % len(self.ks)]
        return super().next()

    def count(self) -> None:
        """The round was worth its time."""
        self._useful += 1


@dataclass(kw_only=True)
class _Samples:
    """What has been measured of one engine."""

    rotation: Rotation
    rounds: dict[int, list[RoundTime]] = field(default_factory=lambda: defaultdict(list))
    firsts: list[tuple[int, float]] = field(default_factory=list)
    futile: int = 0

    @property
    def are_enough(self) -> bool:
        return all(len(self.rounds[k]) >= COUNTED * VISITS for k in self.rotation.ks)


def measure_rounds(
    engines: dict[str, tuple[Engine, tuple[int, ...]]],
    prompts: list[str],
    *,
    batch: int,
    max_new_tokens: int,
    sampling: Sampling,
    report: Callable[[str], None],
) -> dict[str, Costs]:
    """Times the rounds of several engines on one target, in turns.

    Args:
        engines: by name, an engine and the lengths it drafts; 0 for one that drafts nothing.
        prompts: texts; batches begin with one after the other, and with the first again.
        batch: rows decoded together, at least 1.
        max_new_tokens: tokens of an answer; longer texts make slower passes. End-of-sequence tokens end none.
        sampling: how tokens are chosen.
        report: told what is going on.

    Returns:
        The costs, by the engines' names. Prefill is the mean over all engines: it is the same work.

    Raises:
        ValueError: a prompt does not fit into the model, or leaves no room for a draft.
    """
    samples = {name: _Samples(rotation=Rotation(ks)) for name, (_, ks) in engines.items()}
    prefills: list[float] = []
    limits = {name: max(max_new_tokens, 4 * (max(ks) + 1)) for name, (_, ks) in engines.items()}
    for name, (engine, ks) in engines.items():
        report(f"batch {batch}: warming up {name}")
        warm_up = _Samples(rotation=Rotation(ks))
        _decode(engine, warm_up, _batch_of(prompts, batch, 0), limits[name], sampling, rounds=2 * len(ks))
    turn, began_s = 0, time.monotonic()
    while True:
        is_early = turn < LEAST_TURNS or time.monotonic() - began_s < LEAST_S
        unfinished = [name for name in engines if is_early or not samples[name].are_enough]
        if not unfinished:
            return {name: _costs(samples[name], statistics.mean(prefills)) for name in engines}
        report(f"batch {batch}: timing rounds, answer {turn + 1}")
        for name in unfinished:
            rows = _batch_of(prompts, batch, turn)
            prefills.append(_decode(engines[name][0], samples[name], rows, limits[name], sampling))
        turn += 1


def _batch_of(prompts: list[str], batch: int, turn: int) -> list[str]:
    return [prompts[(turn * batch + row) % len(prompts)] for row in range(batch)]


def _decode(
    engine: Engine, samples: _Samples, prompts: list[str], limit: int, sampling: Sampling, rounds: int | None = None
) -> float:
    """Decodes one batch until half of its rows have ended, or for some rounds; returns the seconds of its prefill."""
    requests = requests_of(engine.target, prompts, 1, sampling)
    limit = min(limit, engine.target.capacity - max(len(request.tokens) for request in requests))
    requests = [replace(request, max_new_tokens=limit, eos_ids=frozenset()) for request in requests]
    generations = list(map(Generation, requests))
    rotation = samples.rotation
    # Requests that have ended stay: the batch size is what is measured.
    batch = engine.new_batch(lengths=rotation, keeps_finished=True)
    with engine.in_round():
        batch.join(generations)
    before, room, done, useful = batch.clock.stats, limit, 0, 0
    while not batch.is_finished:
        with engine.in_round():
            output = batch.step()
        after = batch.clock.stats
        taken = RoundTime(
            draft_s=after.draft_s - before.draft_s,
            verify_s=after.verify_s - before.verify_s,
            other_s=after.other_s - before.other_s,
        )
        if not done:
            samples.firsts.append((rotation.k, taken.draft_s))
        elif rotation.is_counted and room > rotation.k:
            rotation.count()
            samples.rounds[rotation.k].append(taken)
            useful += 1
        before, room, done = after, max(generation.room for generation in generations), done + 1
        if 2 * sum(output.finished) >= len(requests) or done == rounds:
            break
    samples.futile = 0 if useful else samples.futile + 1
    if samples.futile >= FUTILE and not samples.are_enough:
        raise ValueError(
            f"after these prompts the model has room for {limit} tokens, too few to draft {rotation.k}: use shorter "
            "prompts or drafts"
        )
    return before.prefill_s


def _costs(samples: _Samples, prefill_s: float) -> Costs:
    rounds = {
        k: RoundTime(
            draft_s=typical([one.draft_s for one in samples.rounds[k]]),
            verify_s=typical([one.verify_s for one in samples.rounds[k]]),
            other_s=typical([one.other_s for one in samples.rounds[k]]),
        )
        for k in samples.rotation.ks
    }
    firsts = [draft_s - rounds[k].draft_s for k, draft_s in samples.firsts]
    return Costs(rounds=rounds, prefill_s=prefill_s, draft_prefill_s=max(statistics.mean(firsts), 0.0))


def typical(values: list[float]) -> float:
    """The mean without the smallest and the largest tenth: rounds differ, but one hiccup of the machine says nothing.

    >>> typical([1.0] * 9 + [100.0])
    1.0
    """
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut : len(values) - cut])

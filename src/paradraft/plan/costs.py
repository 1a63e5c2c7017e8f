"""Measures the time of a round by batch size, draft length and engine, in real rounds on real prompts.

The decoding loop's own clock is used: the drafter's time, the target's pass over K + 1 tokens of each row with the
verdict, and the rest. Lengths and engines take turns, so that a slow moment of the machine and the growing text affect
all of them alike. The first round after a change of length is not counted (docs/decisions.md, 28).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.stats import RoundTime
from paradraft.engine.engine import Engine
from paradraft.engine.request import requests_of
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree

COUNTED = 2
"""Counted rounds of a length before the next length has its turn."""
VISITS = 5
"""Minimum number of turns of a length."""
LEAST_TURNS = 2
"""Minimum number of batches per engine."""
LEAST_S = 5.0
"""Minimum seconds of timing per batch size, because a few answers of a fast model say little."""
FUTILE = 20
"""Consecutive batches without a counted round after which an engine that still lacks rounds fails."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of an engine at a batch size.

    Args:
        rounds: a typical round by the number of drafted tokens.
        prefill_s: the target's prefill of the whole batch.
        draft_prefill_s: extra time of the first draft, in which the drafter reads the prompts.
    """

    rounds: dict[int, RoundTime]
    prefill_s: float
    draft_prefill_s: float


class Rotation(Fixed):
    """Length policy that cycles through `ks`; `is_counted` says whether the current round's time counts."""

    def __init__(self, ks: tuple[int, ...]) -> None:
        super().__init__(ks[0])
        self.ks = ks
        self._turn = 0
        self._rounds = self._useful = 0

    @property
    def is_counted(self) -> bool:
        """Whether this round is not the first of a turn or of a batch."""
        return self._rounds > 1

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Starts a batch, whose first round is a prefill."""
        super().start(tree, is_ragged=is_ragged)
        self._rounds = 0

    def next(self) -> list[int]:
        """The length of the current turn."""
        if self._useful == COUNTED:
            self._turn += 1
            self._rounds = self._useful = 0
        self._rounds += 1
        self.k = self.ks[self._turn % len(self.ks)]
        return super().next()

    def count(self) -> None:
        """Counts the round."""
        self._useful += 1


@dataclass(kw_only=True)
class _Samples:
    """Measured times of an engine; `firsts` are lengths and draft seconds of first rounds."""

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
        engines: an engine and its draft lengths by name; length 0 for plain decoding.
        prompts: texts; batches take them in order and start over at the end.
        max_new_tokens: tokens of an answer; longer texts make slower passes. End-of-sequence tokens are ignored.

    Returns:
        Costs by engine name. Prefill is the mean over all engines, because it is the same work.

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
    """Decodes a batch until half of its rows have ended, or for `rounds` rounds; returns the seconds of its prefill."""
    requests = requests_of(engine.target, prompts, 1, sampling)
    limit = min(limit, engine.target.capacity - max(len(request.tokens) for request in requests))
    requests = [replace(request, max_new_tokens=limit, eos_ids=frozenset()) for request in requests]
    generations = list(map(Generation, requests))
    rotation = samples.rotation
    # Finished requests stay, because a fixed batch size is measured.
    batch = engine.new_batch(lengths=rotation, keeps_finished=True)
    with engine.in_round():
        batch.join(generations)
    last, room, done, counted = batch.clock.stats, limit, 0, 0
    while not batch.is_finished:
        with engine.in_round():
            output = batch.step()
        after = batch.clock.stats
        round_time = RoundTime(
            draft_s=after.draft_s - last.draft_s,
            verify_s=after.verify_s - last.verify_s,
            other_s=after.other_s - last.other_s,
        )
        if not done:
            samples.firsts.append((rotation.k, round_time.draft_s))
        elif rotation.is_counted and room > rotation.k:
            rotation.count()
            samples.rounds[rotation.k].append(round_time)
            counted += 1
        last, room, done = after, max(generation.room for generation in generations), done + 1
        if 2 * sum(output.finished) >= len(requests) or done == rounds:
            break
    samples.futile = 0 if counted else samples.futile + 1
    if samples.futile >= FUTILE and not samples.are_enough:
        raise ValueError(
            f"after these prompts the model has room for {limit} tokens, too few to draft {rotation.k}: use shorter "
            "prompts or drafts"
        )
    return last.prefill_s


def _costs(samples: _Samples, prefill_s: float) -> Costs:
    rounds = {
        k: RoundTime(
            draft_s=typical([round_time.draft_s for round_time in samples.rounds[k]]),
            verify_s=typical([round_time.verify_s for round_time in samples.rounds[k]]),
            other_s=typical([round_time.other_s for round_time in samples.rounds[k]]),
        )
        for k in samples.rotation.ks
    }
    firsts = [draft_s - rounds[k].draft_s for k, draft_s in samples.firsts]
    return Costs(rounds=rounds, prefill_s=prefill_s, draft_prefill_s=max(statistics.mean(firsts), 0.0))


def typical(values: list[float]) -> float:
    """The mean without the smallest and the largest tenth, so that a hiccup of the machine does not count.

    >>> typical([1.0] * 9 + [100.0])
    1.0
    """
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut : len(values) - cut])

"""Prefill of joining requests, in pieces beside the rounds of those that run.

A prefill delays the next round of all running requests. So where a client waits for single tokens, a round reads only a
piece of the prompts, in its own pass where the absent tokens of other rows cost nothing. All prompts are read side by
side, the shortest first, so that none waits for the whole of a longer one.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paradraft.core import Committed, Request
from paradraft.decode.generation import Generation
from paradraft.decode.prefix_cache import Prefix, PrefixCache
from paradraft.models.cached_rows import SavedRow
from paradraft.models.target import Target

OLDEST = 4
"""One token in four is of the prompt that has waited longest, so that shorter ones cannot hold it up for ever."""


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """Requests whose prompts are in the target's cache.

    Args:
        generations: one for each new row.
        requests: theirs, as they were read.
        prompt: their tokens and states, for the drafter.
        prefixes: the cached prefix of each, if any.
    """

    generations: list[Generation]
    requests: list[Request]
    prompt: Committed
    prefixes: list[Prefix | None]


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """A request in prefill; `prefix` was in the cache."""

    generation: Generation
    request: Request
    prefix: Prefix | None


class Prefill:
    """The requests of a batch that are in prefill, in the order in which they came.

    Args:
        target: whose cache the prompts go to.
        cache: prefixes that are not read again.
    """

    def __init__(self, target: Target, cache: PrefixCache) -> None:
        self.pace = PrefillPace()
        self._target, self._cache = target, cache
        self._reading: list[_Reading] = []

    @property
    def generations(self) -> list[Generation]:
        """The requests in prefill; their rows follow those that are decoded."""
        return [reading.generation for reading in self._reading]

    def budgets(self, running: Sequence[Generation]) -> tuple[int, int]:
        """Most prompt tokens to read before the next round, and along with it."""
        if not any(generation.is_watched for generation in [*running, *self.generations]):
            return sys.maxsize, 0
        rows = sum(not generation.is_over for generation in running)
        return (0, self.pace.most(rows)) if rows else (ending(self._target.unread, self.pace.alone), 0)

    def begin(self, generations: Sequence[Generation]) -> None:
        """Adds requests; see `Target.begin` for errors."""
        requests = [generation.so_far for generation in generations]
        prefixes = [self._cache.longest(request.tokens) for request in requests]
        self._target.begin(requests, list(map(_of_target, prefixes)))
        rows = zip(generations, requests, prefixes, strict=True)
        self._reading += [_Reading(generation=row, request=request, prefix=prefix) for row, request, prefix in rows]

    def read(self, budget: int) -> int:
        """Reads a piece of at most `budget` tokens; returns its size."""
        counts = shares(self._target.unread, budget)
        self._target.read(counts)
        return sum(counts)

    def read_along(self, budget: int) -> int:
        """Lets the next round read a piece of at most `budget` tokens too; returns its size."""
        counts = shares(self._target.unread, budget)
        self._target.read_along(counts)
        return sum(counts)

    def admit(self) -> Prefilled | None:
        """The requests whose prompts are read now; they leave the prefill."""
        done = [row for row, left in enumerate(self._target.unread) if not left]
        if not done:
            return None
        prompt = self._target.admit(done)
        ready = [self._reading[row] for row in done]
        self._reading = [reading for row, reading in enumerate(self._reading) if row not in done]
        return Prefilled(
            generations=[reading.generation for reading in ready],
            requests=[reading.request for reading in ready],
            prompt=prompt,
            prefixes=[reading.prefix for reading in ready],
        )

    def drop(self, leaving: Collection[int]) -> bool:
        """Removes the requests in prefill with these `id()`s, and their rows; returns whether there are any."""
        before = len(self._reading)
        for row in reversed(range(len(self._reading))):
            if id(self._reading[row].generation) in leaving:
                del self._reading[row]
                self._target.give_up(row)
        return len(self._reading) < before

    def clear(self) -> None:
        """Forgets all requests; the target has started anew, or will."""
        self._reading = []


def shares(unread: Sequence[int], budget: int) -> list[int]:
    """Shares of prompts in a budget of tokens: the first has a part for sure, and the rest goes to the shortest.

    Args:
        unread: tokens of each prompt, in the order in which they came.

    >>> shares([400, 10, 30], 64), shares([400], 64), shares([400, 900], 64), shares([5, 0], 64)
    ([24, 10, 30], [64], [64, 0], [5, 0])
    >>> shares([400, 60, 90], 64)
    [16, 48, 0]
    """
    counts = [0] * len(unread)
    if counts:
        counts[0] = min(unread[0], -(-budget // OLDEST))
    left = budget - sum(counts)
    for row in sorted(range(len(unread)), key=lambda row: unread[row] - counts[row]):
        more = min(unread[row] - counts[row], left)
        counts[row] += more
        left -= more
    return counts


def ending(unread: Sequence[int], budget: int) -> int:
    """A budget for only the prompts that end within it and the part of the first, so that their rounds begin soon.

    >>> ending([400, 10, 30], 64), ending([400, 900], 64), ending([10], 64)
    (54, 64, 10)
    """
    counts = shares(unread, budget)
    ends = sum(count for count, left in zip(counts, unread, strict=True) if count == left)
    return min(budget, sum(counts), -(-ends * OLDEST // (OLDEST - 1))) if ends else budget


class PrefillPace:
    """Chooses the size of pieces by the times of rounds and of prefills.

    A round takes a constant time, a time for each row that it decodes, and a time for each token of a prompt that it
    reads too; the three are fitted to the last rounds, because a busy server seldom has rounds that read nothing.

    >>> pace = PrefillPace()
    >>> pace.most(1)
    64
    >>> for rows, tokens in ((0, 100), (1, 0), (4, 0), (1, 50)):
    ...     pace.add(rows, tokens, seconds=0.002 + 0.001 * rows + 0.0001 * tokens)
    >>> pace.most(1), pace.most(4), pace.most(7)
    (75, 150, 200)
    """

    ROUNDS_OF_A_PIECE = 2.5
    """Shorter pieces are read at a lower rate, so that their reader waits longer, and the others with it."""
    LEAST = 4
    """Fewer tokens take hardly less time."""
    LEAST_ALONE = 16
    """The same in a separate pass."""
    FIRST = 64
    """Tokens while no time is known."""
    ALONE_S = 0.1
    """Time of a piece where nothing runs: then arrivals and cancellations are seen."""
    GROWTH = 2
    """A piece has at most this many times the tokens of those before it."""
    ROUNDS = 32
    """Rounds remembered of each kind."""
    REFIT = 4
    """Rounds until the times are fitted again."""
    NEAR = 0.1
    """Relative deviation up to which all rounds count alike: others were disturbed."""

    def __init__(self) -> None:
        kinds = ("decoding", "reading", "alone")
        self._rounds = {kind: deque[tuple[int, int, float]](maxlen=self.ROUNDS) for kind in kinds}
        """Rows, tokens and seconds."""
        self._since_fit = self.REFIT
        self._fitted = np.zeros(3)

    def add(self, rows: int, tokens: int, *, seconds: float) -> None:
        """Records the time of a round over `rows` rows that read `tokens` tokens of prompts; no rows: of a prefill."""
        if rows or tokens:
            self._rounds["decoding" if not tokens else "reading" if rows else "alone"].append((rows, tokens, seconds))
            self._since_fit += 1

    def most(self, rows: int) -> int:
        """Size of a piece that a round over `rows` rows reads too: about the time of `ROUNDS_OF_A_PIECE` rounds."""
        if not self._read:
            return self.FIRST
        if not (self._rounds["decoding"] or self._rounds["reading"]):
            return self.LEAST_ALONE
        start_s, row_s, token_s = self._times_s()
        return self._within(self.ROUNDS_OF_A_PIECE * (start_s + row_s * rows), token_s, self.LEAST)

    @property
    def alone(self) -> int:
        """Piece size where no request runs."""
        if not self._read:
            return self.FIRST
        start_s, _, token_s = self._times_s()
        return self._within(self.ALONE_S - start_s, token_s, self.LEAST_ALONE)

    @property
    def _read(self) -> list[int]:
        """Sizes of the last pieces."""
        return [tokens for kind in ("reading", "alone") for _, tokens, _ in self._rounds[kind]]

    def _within(self, seconds: float, token_s: float, least: int) -> int:
        return round(min(max(seconds / token_s, least), max(self.GROWTH * max(self._read), self.FIRST)))

    def _times_s(self) -> tuple[float, float, float]:
        """The constant time of a round, and those of a row and of a token."""
        if self._since_fit >= self.REFIT:
            self._since_fit = 0
            self._fitted = fitted([each for rounds in self._rounds.values() for each in rounds], self.NEAR)
        start_s, row_s, token_s = self._fitted.tolist()
        return start_s, row_s, max(token_s, 1e-9)


def fitted(rounds: Sequence[tuple[int, int, float]], near: float) -> NDArray[np.float64]:
    """The three times, none negative, with the least sum of relative deviations of (rows, tokens, seconds)."""
    rows, tokens, seconds = np.array(rounds, dtype=np.float64).T
    # The least time counts as a fourth of the median's, so that no round decides alone.
    scale = np.maximum(seconds, max(float(np.median(seconds)) / 4.0, 1e-9))
    # Where rounds are all alike, the solution of least norm splits their time evenly.
    most = np.array([1.0, max(rows.max(), 1.0), max(tokens.max(), 1.0)])
    parts = np.stack([np.ones_like(rows), rows, tokens], axis=1) / most / scale[:, None]
    wanted = seconds / scale
    weights, times, used = np.ones_like(rows), np.zeros(3), [0, 1, 2]
    for _ in range(4):
        while True:
            found, *_ = np.linalg.lstsq(parts[:, used] * weights[:, None], wanted * weights, rcond=None)
            if found.min() >= 0.0 or len(used) == 1:
                break
            del used[int(found.argmin())]
        times = np.zeros(3)
        times[used] = np.maximum(found, 0.0)
        weights = np.sqrt(1.0 / np.maximum(np.abs(parts @ times - wanted), near))
    return times / most


def _of_target(prefix: Prefix | None) -> tuple[SavedRow, int] | None:
    return None if prefix is None else (prefix.row.target, prefix.length)

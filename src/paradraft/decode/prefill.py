"""Prefill of joining requests, in pieces beside the rounds of those that run.

A prefill delays the next round of all running requests. So where a client waits for single tokens, a round reads only a
piece of the prompts, in its own pass where the absent tokens of other rows cost nothing. All prompts are read side by
side, the shortest first, so that none waits for the whole of a longer one.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
        if all(generation.is_over for generation in running):
            return ending(self._target.unread, self.pace.alone), 0
        return 0, self.pace.most

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
    """Chooses the size of pieces from the times of rounds and prefills.

    >>> pace = PrefillPace()
    >>> pace.most
    64
    >>> for _ in range(3):
    ...     pace.decode(0.004)
    ...     pace.read(100, 0.010)
    >>> pace.most
    80
    """

    ROUNDS_OF_A_PIECE = 2
    """Shorter pieces are read at a lower rate, so that their reader waits longer, and the others with it."""
    LEAST = 4
    """Fewer tokens take hardly less time."""
    LEAST_ALONE = 16
    """The same in a separate pass."""
    FIRST = 64
    """Tokens while no time is known."""
    ALONE_S = 0.1
    """Time of a piece where nothing runs: then arrivals and cancellations are seen."""
    ROUNDS = 256
    """Rounds remembered: enough to include those of a fuller batch, a while ago."""
    PREFILLS = 16
    """Pieces remembered."""

    def __init__(self) -> None:
        self._rounds_s = deque[float](maxlen=self.ROUNDS)
        self._tokens_s = deque[float](maxlen=self.PREFILLS)

    def decode(self, seconds: float) -> None:
        """Records the time of a round."""
        self._rounds_s.append(seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Records the time of a piece that was read alone."""
        if tokens:
            self._tokens_s.append(seconds / tokens)

    def read_along(self, tokens: int, seconds: float) -> None:
        """Records the time of a round that read a piece too."""
        # A short piece may take no more time: then the next one has at most twice as many tokens.
        self.read(tokens, max(seconds - statistics.median(self._rounds_s or [seconds]), seconds / 2))

    @property
    def most(self) -> int:
        """Size of a piece that a round reads too: its tokens take about as long as `ROUNDS_OF_A_PIECE`."""
        if not self._tokens_s:
            return self.FIRST
        if not self._rounds_s:
            return self.LEAST_ALONE
        most_s = self.ROUNDS_OF_A_PIECE * statistics.median(self._rounds_s)
        return max(int(most_s / self._token_s), self.LEAST)

    @property
    def alone(self) -> int:
        """Piece size where no request runs."""
        return max(int(self.ALONE_S / self._token_s), self.LEAST_ALONE) if self._tokens_s else self.FIRST

    @property
    def _token_s(self) -> float:
        return max(statistics.median(self._tokens_s), 1e-9)


def _of_target(prefix: Prefix | None) -> tuple[SavedRow, int] | None:
    return None if prefix is None else (prefix.row.target, prefix.length)

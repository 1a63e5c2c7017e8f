"""Prefill of joining requests: whole prompts, or one long prompt in chunks between the rounds.

A prefill delays the next round of all running requests. So if one of them is streamed, long prompts are prefilled in
chunks. A chunk takes about as long as a round: chunked prefill slows the other requests down at most about twice.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paradraft.core import Committed, Request
from paradraft.decode.generation import Generation
from paradraft.decode.prefix_cache import Prefix, PrefixCache
from paradraft.models.cached_rows import SavedRow
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """Requests whose prompts are in the target's cache.

    Args:
        requests: one for each new row.
        prompt: their tokens and states, for the drafter.
        prefixes: the cached prefix of each, if any.
    """

    requests: list[Request]
    prompt: Committed
    prefixes: list[Prefix | None]

    @property
    def read(self) -> int:
        """Tokens that were prefilled."""
        return sum(map(_unread, self.requests, self.prefixes))


class Prefill:
    """The requests of a batch that are prefilled now, and those that are next.

    Args:
        target: whose cache the prompts go to.
        cache: prefixes that are not read again.
    """

    def __init__(self, target: Target, cache: PrefixCache) -> None:
        self.pace = PrefillPace()
        self.chunked: Generation | None = None
        """The request in chunked prefill; it has the last row of the target's cache."""
        self._target = target
        self._cache = cache
        self._prefix: Prefix | None = None

    def budget(self, running: Sequence[Generation]) -> int:
        """Prompt tokens to prefill before the next round: about a round's time while any answer is streamed."""
        return self.pace.most if any(generation.is_watched for generation in running) else sys.maxsize

    def unread(self, request: Request) -> int:
        """Number of prompt tokens to prefill, without those that the prefix cache has."""
        return _unread(request, self._cache.longest(request.tokens))

    def next(self, waiting: deque[Generation], budget: int) -> list[Generation]:
        """Takes waiting requests in order while their unread prompt tokens fit the budget; at least one."""
        joining: list[Generation] = []
        while waiting:
            generation = waiting.popleft()
            if generation.is_cancelled or generation.is_finished:
                continue
            budget -= self.unread(generation.so_far)
            if joining and budget < 0:
                waiting.appendleft(generation)
                break
            joining.append(generation)
        return joining

    def whole(self, requests: list[Request]) -> Prefilled:
        """Prefills prompts; see `Target.join` for errors."""
        assert self.chunked is None, "a prompt is prefilled in chunks"
        prefixes = [self._cache.longest(request.tokens) for request in requests]
        prompt = self._target.join(requests, list(map(_of_target, prefixes)))
        return Prefilled(requests=requests, prompt=prompt, prefixes=prefixes)

    def begin(self, generation: Generation) -> None:
        """Begins a chunked prefill, which `chunk` continues; no other request joins until it is done."""
        assert self.chunked is None
        request = generation.so_far
        self._prefix = self._cache.longest(request.tokens)
        self._target.begin(request, _of_target(self._prefix))
        self.chunked = generation

    def chunk(self, most: int) -> tuple[int, Prefilled | None]:
        """Prefills the next chunk, of at most `most` tokens; returns its size, and the request after the last chunk."""
        assert self.chunked is not None
        request = self.chunked.so_far
        tokens, prompt = self._target.read(most)
        if prompt is None:
            return tokens, None
        return tokens, Prefilled(requests=[request], prompt=prompt, prefixes=[self._prefix])

    def drop(self) -> None:
        """Removes the request in chunked prefill, and its row."""
        self.chunked = None
        self._target.give_up()


class PrefillPace:
    """Chooses the chunk size from the times of rounds and prefills.

    >>> pace = PrefillPace()
    >>> pace.most
    64
    >>> for _ in range(3):
    ...     pace.decode(0.004)
    ...     pace.read(100, 0.010)
    >>> pace.most
    40
    """

    LEAST = 16
    """Fewer tokens take hardly less time."""
    FIRST = 64
    """Tokens while no time is known."""
    ROUNDS = 256
    """Rounds remembered: enough to include those of a fuller batch, a while ago."""
    PREFILLS = 16
    """Prefills remembered."""

    def __init__(self) -> None:
        self._rounds_s = deque[float](maxlen=self.ROUNDS)
        self._tokens_s = deque[float](maxlen=self.PREFILLS)

    def decode(self, seconds: float) -> None:
        """Records the time of a round."""
        self._rounds_s.append(seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """Records the time of a prefill."""
        if tokens:
            self._tokens_s.append(seconds / tokens)

    @property
    def most(self) -> int:
        """Chunk size: tokens whose prefill takes about as long as a round."""
        if not self._rounds_s or not self._tokens_s:
            return self.FIRST
        return max(int(statistics.median(self._rounds_s) / max(statistics.median(self._tokens_s), 1e-9)), self.LEAST)


def _unread(request: Request, prefix: Prefix | None) -> int:
    return max(len(request.tokens) - 1 - (0 if prefix is None else prefix.length), 0)


def _of_target(prefix: Prefix | None) -> tuple[SavedRow, int] | None:
    return None if prefix is None else (prefix.row.target, prefix.length)

"""Counts and times of one decoded batch.

Acceptance length is emitted tokens per target pass: the target's own token of each round counts,
tokens cut at a stop do not. Prefill and the drafter's first pass are part of the times.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from paradraft.core import Step


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What happened while decoding; times in seconds.

    Args:
        tokens: emitted tokens.
        rounds: target passes after prefill that gave a row tokens, summed over the rows.
        drafted: drafted tokens, by position in the draft.
        accepted: accepted tokens that were emitted, by position in the draft.
        prefill_s: reading the prompt (target).
        draft_s: everything the drafter did before the target's pass, its own prefill included.
        verify_s: target passes and verification.
        other_s: the rest.
    """

    tokens: int
    rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    prefill_s: float
    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """Time from the prompt to the last token."""
        return self.prefill_s + self.draft_s + self.verify_s + self.other_s

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass."""
        return self.tokens / max(self.rounds, 1)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """For each position of the draft, the share of proposed tokens that were accepted."""
        return tuple(kept / made for kept, made in zip(self.accepted, self.drafted, strict=True) if made)


class Clock:
    """Takes the times and counts the tokens of one batch.

    Each `lap` books the time since the one before under a name: "prefill", "draft", "verify" or
    "other". What a reader of the stream does between two rounds is skipped.

    Args:
        synchronize: called before each reading; `torch.cuda.synchronize` on a GPU.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._times_s = {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}
        self._tokens = self._rounds = 0
        self._drafted: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._last_s = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap."""
        self._synchronize()
        now_s = time.perf_counter()
        self._times_s[name] += now_s - self._last_s
        self._last_s = now_s

    def skip(self) -> None:
        """Books the time since the last lap nowhere."""
        self._last_s = time.perf_counter()

    def count(self, step: Step) -> None:
        """Adds one round."""
        for tokens, drafted, accepted in zip(step.tokens, step.drafted, step.accepted, strict=True):
            self._rounds += bool(tokens)
            self._tokens += len(tokens)
            self._drafted.update(range(drafted))
            self._accepted.update(range(accepted))

    @property
    def stats(self) -> Stats:
        """What has been taken so far."""
        positions = range(len(self._drafted))
        return Stats(
            tokens=self._tokens,
            rounds=self._rounds,
            drafted=tuple(self._drafted[i] for i in positions),
            accepted=tuple(self._accepted[i] for i in positions),
            prefill_s=self._times_s["prefill"],
            draft_s=self._times_s["draft"],
            verify_s=self._times_s["verify"],
            other_s=self._times_s["other"],
        )

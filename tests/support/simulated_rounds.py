"""Rounds of a length policy whose acceptance and times are known, and costs of passes and drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paradraft.decode.lengths.expected_length import Expected
from paradraft.decode.stats import RoundTime
from tests.support.decoding import requests, round_of

Cost = Callable[[int, int], float]


class Simulated:
    """Decoding whose acceptance and times are known.

    Args:
        policy: chooses the lengths of every round, and observes it.
        target_s: seconds of a target pass, by its tokens.
        draft_s: seconds of a draft, by its rows and its depth.
        noise: by which share of it a time is longer, on average.
        prompts: tokens of each.
        reading_s: time in which the drafter reads a token before a row's first draft.
        most: tokens of an answer.
    """

    def __init__(
        self,
        policy: Expected,
        rows: int,
        target_s: Callable[[int], float],
        draft_s: Cost,
        *,
        noise: float = 0.0,
        prompts: Sequence[int] = (),
        reading_s: float = 0.0,
        most: int | None = None,
    ) -> None:
        self.policy, self.rows = policy, rows
        self.target_s, self.draft_s, self.noise = target_s, draft_s, noise
        self.chooser = random.Random(0)
        self.asked: list[list[int]] = []
        self.tokens, self.seconds = 0, 0.0
        self.slowness = 1.0
        self.disturbed = 0.0
        """How often a time is ten times as long."""
        self.unread, self.reading_s = list(prompts or [1] * rows), reading_s
        policy.start(None, is_ragged=True)
        if prompts:
            policy.learn_prefill(sum(prompts) - rows, target_s(sum(prompts)))
        policy.join(requests([[1] * count for count in self.unread], limits=most))

    def run(self, rounds: int, chances: Sequence[float], *, deepest: int = 99) -> None:
        """Rounds in which each token of a row is accepted with its chance, and drafts are at most `deepest`."""
        self.unread = (self.unread + [0] * self.rows)[: self.rows]  # a test may have let rows join or leave
        for _ in range(rounds):
            asked = self.policy.next()
            drafted = [min(length, deepest) for length in asked]
            accepted = [self._accepted(*pair) for pair in zip(drafted, chances, strict=True)]
            verify_s = self.slowness * self.target_s(self.rows + sum(drafted)) * self._noise()
            number = sum(length > 0 for length in asked)
            draft_s = self.slowness * self.draft_s(number, max(asked)) * self._noise() if number else 0.0
            draft_s += self.reading_s * sum(unread for unread, length in zip(self.unread, asked, strict=True) if length)
            left = (0 if length else unread for unread, length in zip(self.unread, asked, strict=True))
            self.unread = [unread + 1 + more for unread, more in zip(left, accepted, strict=True)]
            self.policy.observe(round_of(accepted, drafted), RoundTime(draft_s=draft_s, verify_s=verify_s, other_s=0.0))
            self.asked.append(list(asked))
            self.tokens += self.rows + sum(accepted)
            self.seconds += (draft_s + verify_s) / self.slowness

    def _accepted(self, length: int, chance: float) -> int:
        return next((place for place in range(length) if self.chooser.random() >= chance), length)

    def _noise(self) -> float:
        noise = 1.0 + self.noise * abs(self.chooser.gauss(0.0, 1.0))
        return noise * (10.0 if self.chooser.random() < self.disturbed else 1.0)

    @property
    def speed(self) -> float:
        """Tokens a second, as many times as plain decoding without noise."""
        return self.tokens / self.seconds * self.target_s(self.rows) / self.rows


def flat(tokens: int) -> float:
    """A pass that waits for memory."""
    return 1.0 + 0.005 * tokens


def steep(tokens: int) -> float:
    """A pass that computes."""
    return 1.0 + 0.12 * tokens


def one_pass(rows: int, depth: int) -> float:
    """A parallel drafter."""
    return 0.25 + 0.00125 * rows * 2 * depth


def many_passes(rows: int, depth: int) -> float:
    """An autoregressive drafter."""
    return depth * (0.2 + 0.00125 * rows)

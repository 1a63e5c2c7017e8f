"""Differences between a server's answers and the reference's, answer by answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.audit.reference import Difference
from paradraft.audit.server.endpoint import Served
from paradraft.audit.server.tables import POSITIONS, Table

MOST_DIGITS = 4
"""Digits after the point to which servers may round log-probabilities."""
LEAST_TIE = 1e-4
"""Log-probabilities this near are always a tie, because servers write few digits. A server's own log-probabilities need
no wider tie: its tokens are chosen by the same numbers."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A token of a greedy answer where the reference prefers another.

    Args:
        prompt: counted from 1.
        position: index of the token, from 0.
        margin: difference of their log-probabilities, by the reference.
        own_margin: the same for the likeliest token, by the server itself.
        is_tie: whether rounding explains it.
    """

    prompt: int
    position: int
    token: int
    preferred: int
    margin: float
    own_margin: float
    is_tie: bool


@dataclass(frozen=True, kw_only=True)
class Read:
    """An answer with the ids of the prompt that the model has read."""

    served: Served
    prompt: list[int]


class Findings:
    """Collects differences from the reference, answer by answer; `groups` are tokens that answers do not tell apart."""

    def __init__(self, groups: Sequence[Collection[int]]) -> None:
        self.groups = groups
        self.squares: list[float] = []
        """Squares of the differences between the log-probabilities of the server and the reference."""
        self.logprobs: list[float] = []
        """The server's own of its tokens."""
        self.greedy_tokens = self.greedy_places = 0
        self._largest = 0.0
        self._preferences: list[tuple[int, int, int, int, float, float]] = []

    def add_greedy(self, read: Read, table: Table) -> None:
        """Adds a greedy answer: tokens where another is likelier, and differences of log-probabilities."""
        self.add_difference(read.served, table)
        self.greedy_tokens += len(read.served.tokens)
        for begin in range(0, len(table.logprobs), POSITIONS):
            self._add_preferences(read.served, table.rows(begin, begin + POSITIONS), begin)

    def _add_preferences(self, served: Served, table: Table, begin: int) -> None:
        merged = table.merged(self.groups, summed=False)
        columns_N = merged.columns(served.tokens[begin : begin + POSITIONS])
        known_NC = merged.logprobs[:, 1:] if merged.has_rest else merged.logprobs
        best_N, preferred_N = known_NC.max(1)
        own_N = merged.logprobs.gather(1, columns_N[:, None])[:, 0]
        if merged.has_rest:
            # A token not among those of a server is at most as likely as the last of them.
            least_N = known_NC.masked_fill(known_NC == -math.inf, math.inf).amin(1)
            own_N = torch.where(columns_N == 0, least_N, own_N)
            preferred_N = preferred_N + 1
        margins_N = best_N - own_N
        self.greedy_places += int((best_N > -math.inf).sum())
        for index, margin in enumerate(margins_N.tolist()):
            position = begin + index
            own_margin = _own_margin(served, position)
            if margin > 0 or own_margin > 0:
                preferred = int(merged.ids[preferred_N[index]])
                entry = (served.question.number, position, served.tokens[position], preferred, margin, own_margin)
                self._preferences.append(entry)

    def add_difference(self, served: Served, table: Table) -> None:
        """Adds the differences between the log-probabilities of the server and the reference."""
        columns_N = table.columns(served.tokens)
        reference_N: Tensor = table.logprobs.gather(1, columns_N[:, None])[:, 0]
        for logprob, expected, column in zip(served.logprobs, reference_N.tolist(), columns_N.tolist(), strict=False):
            if logprob is None or (table.has_rest and column == 0):
                continue
            difference = abs(logprob - expected) if math.isfinite(expected) else math.inf
            self.logprobs.append(logprob)
            self.squares.append(difference * difference)
            self._largest = max(self._largest, difference)

    @property
    def difference(self) -> Difference | None:
        """Over all tokens."""
        if not self.squares:
            return None
        mean = sum(self.squares) / len(self.squares)
        return Difference(largest=self._largest, root_mean_square=math.sqrt(mean))

    def judged(self, explained: float) -> list[Preference]:
        """All preferences; a tie is at most twice as wide as the two sides differ, because each token may be off."""
        limit = max(2 * min(self._largest, explained), LEAST_TIE)
        return [
            Preference(
                prompt=prompt, position=position, token=token, preferred=preferred, margin=margin,
                own_margin=own_margin, is_tie=margin <= limit and own_margin <= LEAST_TIE,
            )
            for prompt, position, token, preferred, margin, own_margin in self._preferences
            if margin > 0 or own_margin > LEAST_TIE
        ]  # fmt: skip


def _own_margin(served: Served, position: int) -> float:
    logprob = served.logprobs[position]
    if logprob is None or not served.likeliest[position]:
        return 0.0
    return max(served.likeliest[position].values()) - logprob


def digits_of(logprobs: Sequence[float]) -> int | None:
    """The digits after the point to which a server rounds log-probabilities; None for more than `MOST_DIGITS`.

    >>> digits_of([-0.25, -1.5] * 8), digits_of([-1 / 3] * 16)
    (2, None)
    """
    some = [logprob for logprob in logprobs if logprob < -0.01]
    if len(some) < 2 * MOST_DIGITS:
        return None
    return next(
        (n for n in range(MOST_DIGITS + 1) if all(abs(logprob - round(logprob, n)) < 1e-6 for logprob in some)), None
    )


def error_of_digits(digits: int) -> Difference:
    """Error of rounding to this many digits after the point."""
    unit = 10.0**-digits
    return Difference(largest=unit / 2, root_mean_square=unit / math.sqrt(12))

"""Length policy `expected` for drafts whose nodes have values: verifies those that are worth their time in this round.

`Expected` knows how often the first, second, … node of a draft is accepted on average. A drafter that estimates the
chance of each node (`Draft.values`) knows more: it may be sure of eight tokens in this round and of none in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paradraft.core import Draft, Request
from paradraft.decode.lengths.round_costs import RoundCosts
from paradraft.decode.stats import RoundOutput
from paradraft.ragged import upload
from paradraft.tree import Tree


def most_worth(
    values: Sequence[Sequence[float]], seconds: Callable[[Sequence[int]], float]
) -> tuple[list[list[bool]], float]:
    """The nodes of a batch's drafts with the most expected tokens per second.

    Args:
        values: of each row's nodes, never above the parent's.
        seconds: the time of a round from the number of nodes of each row.

    Returns:
        Whether each node is verified, and the expected tokens per second.

    >>> most_worth([[0.9, 0.2], [0.6]], lambda nodes: 1.0 + 0.25 * sum(nodes))
    ([[True, False], [True]], 2.3333333333333335)
    """
    order = sorted((-value, row, node) for row, of_row in enumerate(values) for node, value in enumerate(of_row))
    counts, tokens, kept = [0] * len(values), float(len(values)), 0
    rate = tokens / seconds(counts)
    for taken, (value, row, _) in enumerate(order, start=1):
        counts[row] += 1
        tokens -= value
        if (with_it := tokens / seconds(counts)) > rate:
            rate, kept = with_it, taken
    chosen = {(row, node) for _, row, node in order[:kept]}
    return [[(row, node) in chosen for node in range(len(of_row))] for row, of_row in enumerate(values)], rate


class ValuedDrafts:
    """Cuts each draft to the nodes that are worth their time; the drafter's own time is negligible.

    Exploration: a pass of a size that was not measured twice is expected to take as long as a smaller one, so every
    size that might pay is tried. A size may seem too slow because its passes were disturbed: so whole drafts are
    verified now and then, as long as the time lost stays within `EXPLORE` of all time. After `PLAIN_AFTER` rounds
    without a plain one, two are run, to compare.
    """

    wants_confidence = False
    runs_plain = True

    EXPLORE = 0.01
    """The share of all time that whole drafts may lose."""
    MOST_LOST = 2.0
    """Most plain rounds that a trial is said to have lost: it may have been disturbed."""
    EARLY_TRIALS = 3
    """The first trials wait …"""
    SOON = 12
    """… for this many rounds at most."""
    PLAIN_AFTER = 128
    """Rounds with drafts before two plain ones."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._costs = RoundCosts()
        self._lost_s = 0.0
        self._trials = self._since_trial = 0
        self._rows = self._since_plain = self._plain_left = 0
        self._is_trial = False
        self._rate = 0.0
        """Expected tokens per second of the best cut of this round."""

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Drops all rows; keeps the measured times."""
        self._costs.is_ragged = is_ragged
        self._rows = self._since_plain = self._plain_left = 0

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows."""
        self._rows += len(requests)

    def keep(self, rows: Tensor) -> None:
        """Drops the other rows."""
        self._rows = len(rows)

    def next(self) -> list[int]:
        """K for every row, or 0 to measure plain rounds."""
        self._is_trial = False
        if self._since_plain >= self.PLAIN_AFTER:
            self._plain_left = 2
        is_plain = self._plain_left or not self._costs.knows_plain(self._rows)
        return [0 if is_plain else self.k] * self._rows

    def cut(self, draft: Draft) -> Draft:
        """Removes the nodes that are not worth their time."""
        if not draft.tokens.shape[1] or draft.values is None:
            return draft
        are_kept, self._rate = most_worth(draft.values, self._seconds)
        if all(map(all, are_kept)):
            return draft
        if self._lost_s <= 0.0 or (self._trials < self.EARLY_TRIALS and self._since_trial >= self.SOON):
            self._is_trial = True
            return draft
        width = draft.tokens.shape[1]
        padded = [row + [False] * (width - len(row)) for row in are_kept]
        return draft.where(upload(padded, draft.tokens.device) > 0)

    def _seconds(self, nodes: Sequence[int]) -> float:
        return self._costs.seconds_after_drafting(self._rows, [count for count in nodes if count])

    def observe(self, output: RoundOutput, *, draft_s: float, verify_s: float, other_s: float) -> None:
        """Learns the time of the round."""
        nodes = [count for count in output.nodes if count]
        self._since_plain = self._since_plain + 1 if nodes else 0
        self._plain_left = max(self._plain_left - 1, 0)
        self._costs.learn(
            self._rows, nodes, self.k, draft_s=draft_s, verify_s=verify_s, other_s=other_s, unread=0, is_first=False,
            is_usual=not self._is_trial,
        )  # fmt: skip
        seconds = self._costs.of_usual(verify_s + other_s)
        self._since_trial += 1
        if self._is_trial:
            self._trials, self._since_trial = self._trials + 1, 0
            lost_s = seconds - sum(map(len, output.tokens)) / self._rate
            most_s = self.MOST_LOST * self._costs.seconds_after_drafting(self._rows, [])
            self._lost_s = max(min(lost_s, most_s), 0.0)
        else:
            self._lost_s = max(self._lost_s - self.EXPLORE * seconds, 0.0)

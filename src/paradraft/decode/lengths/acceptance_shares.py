"""How often each node of a draft is accepted, learnt from the rounds that were run."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field


def decreasing(numbers: Sequence[float]) -> list[float]:
    """The numbers, where a later one is larger than those before it replaced by their mean.

    So the first n have the largest sum that the first n can have at the price of the last one, or less.

    >>> decreasing([0.6, 0.1, 0.4, 0.2])
    [0.6, 0.25, 0.25, 0.2]
    """
    means: list[tuple[float, int]] = []
    for number in numbers:
        mean, count = number, 1
        while means and means[-1][0] < mean:
            before, several = means.pop()
            mean, count = (before * several + mean * count) / (several + count), several + count
        means.append((mean, count))
    return [mean for mean, count in means for _ in range(count)]


@dataclass(kw_only=True)
class Counts:
    """Of each node of a draft, in how many rounds it could be accepted and in how many it was; older ones count less.

    A node of a chain can be accepted if the one before it was; one of a tree whenever it was asked for.
    """

    could: list[float] = field(default_factory=list)
    was: list[float] = field(default_factory=list)

    def fade(self, nodes: int, share: float) -> None:
        """Of the first nodes, leaves a share of what is known."""
        more = [0.0] * (nodes - len(self.could))
        self.could += more
        self.was += more
        for node in range(nodes):
            self.could[node] *= share
            self.was[node] *= share


class AcceptanceShares:
    """How often the nodes of a draft are accepted: in all rows, and in each.

    Args:
        most: nodes of a draft.
        is_chain: whether each follows the one before.
    """

    MEMORY = 0.97
    """How much of its weight what is known of all rows keeps with every round in which some row drafts."""
    ROW_MEMORY = 0.95
    """The same for what is known of one row, with every round in which it drafts."""
    PRIOR = 8.0
    """How many rounds of a row itself weigh as much as what is known of all rows."""
    FIRST = 0.7
    """How often a token is taken to be accepted before anything is known."""
    FIRST_PRIOR = 3.0
    """How many rounds that weighs."""

    def __init__(self, most: int, *, is_chain: bool) -> None:
        self.most = most
        self.is_chain = is_chain
        self._all = Counts()
        self._there = [(self.FIRST_PRIOR, self.FIRST_PRIOR)] * most
        """For each node, in how many rounds it was asked for and in how many the drafter gave one."""
        self._rows: list[Counts] = []

    def start(self) -> None:
        """Forgets the rows, and keeps what is known of all."""
        self._rows = []

    def join(self, rows: int) -> None:
        """New rows are like all others until more is known of them."""
        self._rows += [Counts() for _ in range(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets the other rows."""
        self._rows = [self._rows[row] for row in rows]

    def learn(self, asked: Sequence[int], drafted: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Adds a round.

        Args:
            asked: how many nodes of each row could have been drafted; 0 for rows of which nothing is learnt.
            drafted: how many were.
            paths: which of them were accepted.
        """
        longest = max(asked)
        self._all.fade(longest, self.MEMORY)
        for node in range(longest):
            self._there[node] = self._there[node][0] * self.MEMORY, self._there[node][1] * self.MEMORY
        for row, nodes in enumerate(asked):
            if nodes:
                self._rows[row].fade(nodes, self.ROW_MEMORY)
                accepted = set(paths[row])
                for node in range(nodes):
                    times, there = self._there[node]
                    self._there[node] = times + 1.0, there + (node < drafted[row])
                    if not self.is_chain or node == 0 or node - 1 in accepted:
                        for counts in (self._all, self._rows[row]):
                            counts.could[node] += 1.0
                            counts.was[node] += node in accepted

    def shares(self) -> list[list[float]]:
        """For each row and node, the share of rounds that accept it; see `decreasing`."""
        rates = self._rates_of_all()
        of_all = self._shares_of(rates)
        return [self._shares_of(self._rates_of(row, rates)) if row.could else of_all for row in self._rows]

    def _rates_of_all(self) -> list[float]:
        """How often each node is accepted where it can be; little is known of one at first, and then what is known of
        the one before."""
        rates, prior, weight = [], self.FIRST, self.FIRST_PRIOR
        for could, was, _ in itertools.zip_longest(self._all.could, self._all.was, range(self.most), fillvalue=0.0):
            rates.append((was + weight * prior) / (could + weight))
            prior = rates[-1] if self.is_chain else rates[-1] * self.FIRST
        return rates

    def _rates_of(self, row: Counts, rates: list[float]) -> list[float]:
        """The same of one row, by what is known of it and of all."""
        triples = itertools.zip_longest(row.could, row.was, rates, fillvalue=0.0)
        return [(was + self.PRIOR * rate) / (could + self.PRIOR) for could, was, rate in triples]

    def _shares_of(self, rates: list[float]) -> list[float]:
        """A node of a chain is accepted if it and all before it are."""
        return decreasing(list(itertools.accumulate(rates, operator.mul)) if self.is_chain else rates)

    def there(self) -> list[float]:
        """How many tokens a draft has, on average, if it is asked for 0, 1, 2, … nodes."""
        return list(itertools.accumulate((there / times for times, there in self._there), initial=0.0))

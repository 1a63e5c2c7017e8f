"""Acceptance rate of each node of a draft, learnt from past rounds."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from paradraft.decode.lengths.isotonic import decreasing


@dataclass(kw_only=True)
class AcceptanceCounts:
    """By node of a draft, the weighted rounds in which it could be accepted and in which it was; older ones weigh less.

    A node of a chain can be accepted if the one before it was; a node of a tree whenever it was requested.
    """

    could: list[float] = field(default_factory=list)
    was: list[float] = field(default_factory=list)

    def fade(self, nodes: int, share: float) -> None:
        """Multiplies the counts of the first nodes by `share`."""
        more = [0.0] * (nodes - len(self.could))
        self.could += more
        self.was += more
        for node in range(nodes):
            self.could[node] *= share
            self.was[node] *= share


class AcceptanceShares:
    """Acceptance rates of the at most `most` nodes of a draft: over all rows, and by row."""

    MEMORY = 0.97
    """Decay of the counts over all rows per round in which some row drafts."""
    ROW_MEMORY = 0.95
    """Decay of the counts of a row per round in which it drafts."""
    PRIOR = 8.0
    """Weight, in rounds of the row itself, of the rates over all rows."""
    FIRST = 0.7
    """Acceptance rate of a token before any observation."""
    FIRST_PRIOR = 3.0
    """Weight of `FIRST` in rounds."""

    def __init__(self, most: int, *, is_chain: bool) -> None:
        self.most = most
        self.is_chain = is_chain
        self._all = AcceptanceCounts()
        self._drafted = [(self.FIRST_PRIOR, self.FIRST_PRIOR)] * most
        """By node, the weighted rounds in which it was requested, and in which the drafter returned it."""
        self._rows: list[AcceptanceCounts] = []

    def start(self) -> None:
        """Drops the rows; keeps the counts over all rows."""
        self._rows = []

    def join(self, rows: int) -> None:
        """Adds rows, with the rates over all rows as their prior."""
        self._rows += [AcceptanceCounts() for _ in range(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops the other rows."""
        self._rows = [self._rows[row] for row in rows]

    def learn(self, requested: Sequence[int], drafted: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Adds a round.

        Args:
            requested: by row, the number of requested nodes; 0 for rows to ignore.
            drafted: by row, the number of drafted nodes.
            paths: by row, the accepted nodes.
        """
        longest = max(requested)
        self._all.fade(longest, self.MEMORY)
        for node in range(longest):
            self._drafted[node] = self._drafted[node][0] * self.MEMORY, self._drafted[node][1] * self.MEMORY
        for row, nodes in enumerate(requested):
            if nodes:
                self._rows[row].fade(nodes, self.ROW_MEMORY)
                accepted = set(paths[row])
                for node in range(nodes):
                    rounds, drafted_rounds = self._drafted[node]
                    self._drafted[node] = rounds + 1.0, drafted_rounds + (node < drafted[row])
                    if not self.is_chain or node == 0 or node - 1 in accepted:
                        for counts in (self._all, self._rows[row]):
                            counts.could[node] += 1.0
                            counts.was[node] += node in accepted

    def shares(self) -> list[list[float]]:
        """By row and node, the share of rounds that accept it, never more than that of the node before it.

        So the marginal gain of each node is at most that of the nodes before it, and a threshold selects a prefix.
        """
        rates = self._rates_of_all()
        of_all = self._shares_of(rates)
        return [self._shares_of(self._rates_of(row, rates)) if row.could else of_all for row in self._rows]

    def _rates_of_all(self) -> list[float]:
        """By node, the acceptance rate where it can be accepted; the prior is the rate of the node before."""
        rates, prior, weight = [], self.FIRST, self.FIRST_PRIOR
        for could, was, _ in itertools.zip_longest(self._all.could, self._all.was, range(self.most), fillvalue=0.0):
            rates.append((was + weight * prior) / (could + weight))
            prior = rates[-1] if self.is_chain else rates[-1] * self.FIRST
        return rates

    def _rates_of(self, row: AcceptanceCounts, rates: list[float]) -> list[float]:
        """`_rates_of_all` for one row, with the rates over all rows as the prior."""
        triples = itertools.zip_longest(row.could, row.was, rates, fillvalue=0.0)
        return [(was + self.PRIOR * rate) / (could + self.PRIOR) for could, was, rate in triples]

    def _shares_of(self, rates: list[float]) -> list[float]:
        """Shares from rates: a node of a chain is accepted only if all nodes before it are."""
        return decreasing(list(itertools.accumulate(rates, operator.mul)) if self.is_chain else rates)

    def drafted_nodes(self) -> list[float]:
        """Mean number of drafted tokens if 0, 1, 2, … nodes are requested."""
        return list(itertools.accumulate((drafted / rounds for rounds, drafted in self._drafted), initial=0.0))

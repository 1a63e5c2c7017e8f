"""Chances of the tokens of a drafter that does not estimate them, learnt from the rounds of each row.

A drafter's confidence is its largest probability at a place. How often such a token is accepted depends on the pair of
models and on the text, so it is counted, by confidence.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from paradraft.core import Draft
from paradraft.drafters.parts.estimating import Node, at_odds
from paradraft.parents import depths_of_row
from paradraft.tree import ABSENT

BINS = 8
"""Number of ranges of confidence."""
UNKNOWN = 0.5
"""The confidence of a drafter that says none."""
PRIOR = 4.0
"""Weight, in tokens, of the confidence itself as the chance."""
MEMORY = 0.98
"""Decay of counts per token, and of the mean length per round with a draft."""
FIRST, FIRST_PRIOR = 2.0, 2.0
"""Accepted tokens of a draft before any is known, and the weight of this guess in drafts."""
AGAIN = 16
"""Rounds without a draft after which one is made, to see how long it would be; twice as many after each that does not
pay."""
LAST = 8
"""Number of times whose median is the drafter's."""


class RowCalibration:
    """What is known of a row's drafts.

    >>> row = RowCalibration()
    >>> for _ in range(50):
    ...     nodes = row.nodes([5, 6], [-1, 0], [0.95, 0.95], 2, 1.0)
    ...     row.learn([5, 7])
    >>> round(row.accepted, 1), [round(node.value, 1) for node in nodes]
    (1.0, [0.5, 0.3])
    """

    def __init__(self) -> None:
        self._totals = FIRST * FIRST_PRIOR, FIRST_PRIOR
        """Accepted tokens and number of drafts; older ones weigh less."""
        self.skipped, self.again = 0, AGAIN
        """Rounds since the last draft, and those after which one is made."""
        self.is_read = False
        """Whether the last round had a draft, so that the drafter has read the text."""
        self._was = [PRIOR * (index + 0.5) / BINS for index in range(BINS)]
        self._could = [PRIOR] * BINS
        """By confidence, tokens after accepted ones, and those of them that were accepted."""
        self._children: dict[int, list[tuple[int, int, int]]] = {}
        """By node of the last draft, its children: token, node and bin."""

    @property
    def accepted(self) -> float:
        """Mean number of accepted tokens of a draft."""
        tokens, drafts = self._totals
        return tokens / drafts

    def nodes(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        confidences: Sequence[float | None],
        most: int,
        factor: float,
    ) -> list[Node]:
        """The nodes of a draft down to a depth, with their chances; remembers them. `factor` is that of their odds."""
        self._children = defaultdict(list)
        nodes, new = list[Node](), {ABSENT: ABSENT}
        rows = zip(tokens, parents, confidences, depths_of_row(tokens, parents), strict=True)
        for node, (token, parent, sure, depth) in enumerate(rows):
            if token == ABSENT or depth > most or parent not in new:
                continue
            index, above = min(int((UNKNOWN if sure is None else sure) * BINS), BINS - 1), new[parent]
            chance = at_odds(self._was[index] / self._could[index], factor)
            value = (nodes[above].value if above >= 0 else 1.0) * chance
            new[node] = len(nodes)
            self._children[above].append((token, new[node], index))
            nodes.append(Node(token, above, value, 1.0 if sure is None else sure))  # the policy "confidence" keeps it
        return nodes

    def learn(self, committed: Sequence[int]) -> None:
        """Compares the draft with the tokens that were committed, down to the last that was decided."""
        if not self._children:
            return
        right, at = 0, ABSENT
        for own in committed:
            after = self._children.get(at, ())
            for token, node, index in after:
                self._was[index] = MEMORY * self._was[index] + (token == own)
                self._could[index] = MEMORY * self._could[index] + 1.0
                at = node if token == own else at
            if all(token != own for token, _, _ in after):
                break
            right += 1
        self._totals = MEMORY * self._totals[0] + right, MEMORY * self._totals[1] + 1.0
        self._children = {}


class Calibration:
    """The calibrations of all rows of a batch for one drafter.

    Args:
        is_slow: whether half a draft takes half the time, so that drafts should not be much longer than is accepted.
    """

    def __init__(self, *, is_slow: bool) -> None:
        self._is_slow = is_slow
        self._rows: list[RowCalibration] = []
        self._seconds: deque[float] = deque(maxlen=LAST)
        """Times of the last drafts of a row, without those for which texts had to be read."""
        self._timed = 0
        """Rows that draft in this round, if all have been read."""

    def start(self) -> None:
        """Drops all rows."""
        self._rows = []

    def join(self, rows: int) -> None:
        """Adds rows."""
        self._rows += [RowCalibration() for _ in range(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops and reorders rows."""
        self._rows = [self._rows[row] for row in rows]

    def lengths(self, lengths: Sequence[int], expected: Sequence[float], plain_s: float) -> list[int]:
        """The largest depth of each row's draft: 0 where it is not worth its time beside the other drafts.

        It is if it has more accepted tokens, by more than plain rounds commit in its time.

        Args:
            lengths: the largest depths that are asked for.
            expected: accepted tokens of the other drafts.
            plain_s: time of a plain round of all rows, in seconds; 0 if it is unknown.
        """
        plain_tokens = len(lengths) * statistics.median(self._seconds) / plain_s if self._seconds and plain_s else 0.0
        asked, were_read = [], True
        for row, k, others in zip(self._rows, lengths, expected, strict=True):
            if not k:
                row.is_read = False
                asked.append(0)
                continue
            pays = row.accepted > others + plain_tokens
            is_left_out = not pays and row.skipped < row.again
            if not is_left_out:
                row.again = AGAIN if pays else 2 * row.again
            row.skipped = row.skipped + 1 if is_left_out else 0
            most = round(row.accepted) + 1 if self._is_slow else k
            asked.append(0 if is_left_out else min(k, most))
            were_read &= row.is_read or not asked[-1]
            row.is_read = asked[-1] > 0
        self._timed = sum(map(bool, asked)) if were_read else 0
        return asked

    def add_time(self, seconds: float) -> None:
        """Adds the time of the drafts of this round."""
        if self._timed:
            self._seconds.append(seconds / self._timed)

    def nodes(self, draft: Draft, lengths: Sequence[int], factor: float) -> list[list[Node]]:
        """The nodes of each row of a draft, no deeper than was asked for; see `RowCalibration.nodes`."""
        unknown = [[None] * draft.tokens.shape[1]] * len(lengths)
        sure = unknown if draft.confidence is None else draft.confidence.tolist()
        rows = zip(self._rows, *draft.lists, sure, lengths, strict=True)
        return [row.nodes(tokens, parents, own, most, factor) for row, tokens, parents, own, most in rows]

    def learn(self, committed: Sequence[Sequence[int]]) -> None:
        """Adds the committed tokens of a round."""
        for row, tokens in zip(self._rows, committed, strict=True):
            row.learn(tokens)

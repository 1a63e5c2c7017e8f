"""Chances of the tokens of a drafter that does not estimate them, learnt from the rounds of each row.

A drafter's confidence is its largest probability at a place. How often such a token is accepted depends on the pair of
models and on the text, so it is counted, by confidence.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from paradraft.core import Draft, Request
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
EXPLORE = 0.02
"""The share of all time that such trials may take."""
LAST = 8
"""Number of times whose median is the drafter's."""
MOST_LEFT = 128
"""Largest expected number of remaining tokens of an answer: many end before their limit."""


class RowCalibration:
    """What is known of a row's drafts.

    >>> row = RowCalibration()
    >>> for _ in range(50):
    ...     nodes = row.nodes([5, 6], [-1, 0], [0.95, 0.95], 2, 1.0)
    ...     row.learn([5, 7])
    >>> round(row.accepted, 1), [round(node.value, 1) for node in nodes]
    (1.0, [0.5, 0.3])

    Args:
        length: number of tokens of the prompt.
        room: most tokens that follow.
        first: expected accepted tokens of a draft before any is known.
    """

    def __init__(self, *, length: int = 0, room: int = MOST_LEFT, first: float = FIRST) -> None:
        self.length, self.room, self.read = length, room, 0
        """Tokens of the text, most that follow, and tokens that the drafter has read."""
        self._totals = first * FIRST_PRIOR, FIRST_PRIOR
        """Accepted tokens and number of drafts; older ones weigh less."""
        self.skipped, self.again = 0, AGAIN
        """Rounds since the last draft, and those after which one is made."""
        self.goes_on = False
        """Whether the last round had a draft, so that the drafter has read the text before it."""
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

    def learn(self, committed: Sequence[int]) -> int | None:
        """Compares the draft with the tokens that were committed, down to the last that was decided.

        Returns:
            The number of accepted tokens; None without a draft.
        """
        self.length, self.room = self.length + len(committed), self.room - len(committed)
        if not self._children:
            return None
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
        return right


class Calibration:
    """The calibrations of all rows of a batch for one drafter.

    Args:
        is_slow: whether half a draft takes half the time, so that drafts should not be much longer than is accepted.
    """

    def __init__(self, *, is_slow: bool) -> None:
        self._is_slow = is_slow
        self._rows: list[RowCalibration] = []
        self._totals = FIRST * FIRST_PRIOR, FIRST_PRIOR
        """Accepted tokens and number of drafts of all rows, those that have left too; older ones weigh less."""
        self._seconds: deque[float] = deque(maxlen=LAST)
        """Times of the last drafts of a row, without those for which texts had to be read …"""
        self._readings: deque[tuple[float, int, int]] = deque(maxlen=LAST)
        """… and of drafts of a round with them: time, number of drafting rows, and tokens to read."""
        self._drafting = self._unread = 0
        """In this round the number of drafting rows, and of tokens that they read first."""
        self._plain_s = self._lost_s = 0.0
        """Time of a plain round, or 0; time of trials that plain rounds have not made up for."""

    def start(self) -> None:
        """Drops all rows; keeps the measured times."""
        self._rows = []

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows. If plain rounds were timed, the rows before say how much is accepted at first."""
        first = self._totals[0] / self._totals[1] if self._plain_s else FIRST
        self._rows += [
            RowCalibration(
                length=len(request.tokens), room=request.max_new_tokens - request.answered, first=first
            )
            for request in requests
        ]  # fmt: skip

    def keep(self, rows: Sequence[int]) -> None:
        """Drops and reorders rows."""
        self._rows = [self._rows[row] for row in rows]

    def save(self, row: int) -> int:
        """The number of tokens of a row that the drafter has read."""
        return self._rows[row].read

    def restore(self, row: int, read: int, shared: int) -> None:
        """The drafter has read `read` tokens of another row, and the first `shared` are those of this row."""
        self._rows[row].read = min(read, shared)

    def lengths(self, lengths: Sequence[int], expected: Sequence[float], plain_s: float) -> list[int]:
        """The largest depth of each row's draft: 0 where it is not worth its time beside the other drafts.

        It is if it has more accepted tokens, by more than plain rounds commit in its time. A text that must be read
        before is spread over the rounds that are left.

        Args:
            lengths: the largest depths that are asked for.
            expected: accepted tokens of the other drafts.
            plain_s: time of a plain round of all rows, in seconds; 0 if it is unknown.
        """
        self._plain_s, self._drafting, self._unread = plain_s, 0, 0
        self._lost_s = max(self._lost_s - EXPLORE * plain_s, 0.0)
        draft_s, reading_s = self._times_s()
        asked = []
        for row, k, others in zip(self._rows, lengths, expected, strict=True):
            unread = 0 if row.goes_on else row.length - row.read
            rounds_left = max(min(row.room, MOST_LEFT) / (1.0 + max(row.accepted, others)), 1.0)
            seconds = draft_s + reading_s * unread / rounds_left
            pays = row.accepted > others + (len(lengths) * seconds / plain_s if plain_s else 0.0)
            if not k or (not pays and (row.skipped < row.again or self._lost_s)):
                row.goes_on = False
                row.skipped += k > 0
                asked.append(0)
                continue
            if not pays and plain_s:
                self._lost_s += draft_s + reading_s * unread
            row.again, row.skipped = AGAIN if pays else 2 * row.again, 0
            row.goes_on, row.read = True, row.length
            self._drafting, self._unread = self._drafting + 1, self._unread + unread
            asked.append(min(k, round(row.accepted) + 1 if self._is_slow else k))
        return asked

    def _times_s(self) -> tuple[float, float]:
        """The times of a row's draft and of reading a token; 0 before any was measured."""
        draft_s = statistics.median(self._seconds) if self._seconds else 0.0
        more_s = sum(seconds - rows * draft_s for seconds, rows, _ in self._readings)
        return draft_s, max(more_s / max(sum(tokens for *_, tokens in self._readings), 1), 0.0)

    def add_time(self, seconds: float) -> None:
        """Adds the time of the drafts of this round."""
        if self._unread:
            self._readings.append((seconds, self._drafting, self._unread))
        elif self._drafting:
            self._seconds.append(seconds / self._drafting)

    def nodes(self, draft: Draft, lengths: Sequence[int], factor: float) -> list[list[Node]]:
        """The nodes of each row of a draft, no deeper than was asked for; see `RowCalibration.nodes`."""
        unknown = [[None] * draft.tokens.shape[1]] * len(lengths)
        sure = unknown if draft.confidence is None else draft.confidence.tolist()
        rows = zip(self._rows, *draft.lists, sure, lengths, strict=True)
        return [row.nodes(tokens, parents, own, most, factor) for row, tokens, parents, own, most in rows]

    def learn(self, committed: Sequence[Sequence[int]]) -> None:
        """Adds the committed tokens of a round."""
        for row, tokens in zip(self._rows, committed, strict=True):
            if (right := row.learn(tokens)) is not None:
                self._totals = MEMORY * self._totals[0] + right, MEMORY * self._totals[1] + 1.0

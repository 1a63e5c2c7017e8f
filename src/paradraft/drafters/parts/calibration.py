"""Chances of the tokens of a drafter that does not estimate them, learnt from the rounds of each row.

A drafter's confidence is its largest probability at a place. How often such a token is accepted depends on the pair of
models and on the text, so it is counted, by confidence.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from paradraft.core import NO_LIMIT, Draft, Request
from paradraft.drafters.parts.depth_rates import DepthRates
from paradraft.drafters.parts.draft_times import DraftTimes
from paradraft.drafters.parts.estimating import Node, at_odds
from paradraft.drafters.parts.rest_gains import RestGains
from paradraft.parents import depths_of_row
from paradraft.tree import ABSENT

BINS = 8
"""Number of ranges of confidence."""
UNKNOWN = 0.5
"""The confidence of a drafter that says none."""
PRIOR = 4.0
"""Weight, in tokens, of the confidence itself as the chance."""
MEMORY = 0.98
"""Decay of counts per token."""
AGAIN = 16
"""Without times, the rounds without a draft after which one is made, to see how long it would be; twice as many after
each that does not pay."""
EXPLORE, MOST_SAVED = 0.02, 64
"""With times, the share of all time that such trials take, and the most time saved for them, in plain rounds."""
TRIAL = 2
"""Rounds of such a trial: the first one, which reads the text, does not show the time of a draft."""
ANSWER, CHANGE = 128.0, 0.2
"""Tokens of an answer before any is known, and the rate at which answers change this number."""


class RowCalibration:
    """What is known of a row's drafts.

    >>> row = RowCalibration(length=3)
    >>> for _ in range(50):
    ...     nodes = row.nodes([5, 6], [-1, 0], [0.95, 0.95], 2, 1.0)
    ...     row.learn([5, 7], DepthRates())
    >>> round(row.rates.accepted(2)[-1], 1), [round(node.value, 1) for node in nodes]
    (1.0, [0.5, 0.3])

    Args:
        length: number of tokens of the prompt.
        limit: most tokens that follow.
        left_out: tokens of the prompt that the drafter does not read.
    """

    def __init__(self, *, length: int, limit: int = NO_LIMIT, left_out: int = 0) -> None:
        self._prompt, self._limit = length, limit
        self._length = length
        self.read = left_out
        """Tokens that the drafter has read, or does not read."""
        self.rates = DepthRates()
        self.skipped, self.again = 0, AGAIN
        """Rounds since the last draft, and those after which one is made, if nothing was timed."""
        self.trial = 0
        """Rounds left of a trial."""
        self.goes_on = False
        """Whether the last round had a draft, so that the drafter has read the text before it."""
        self._was = [PRIOR * (index + 0.5) / BINS for index in range(BINS)]
        self._could = [PRIOR] * BINS
        """By confidence, tokens after accepted ones, and those of them that were accepted."""
        self._children: dict[int, list[tuple[int, int, int]]] = {}
        """By node of the last draft, its children: token, node and bin."""

    @property
    def unread(self) -> int:
        """Tokens that the drafter reads before a draft in this round, besides those of the last one."""
        return 0 if self.goes_on else self._length - self.read

    @property
    def answered(self) -> int:
        """Tokens committed after the prompt."""
        return self._length - self._prompt

    @property
    def room(self) -> int:
        """Most tokens that follow."""
        return self._limit - self.answered

    def draft(self) -> None:
        """A draft is made in this round."""
        self.goes_on, self.read, self.skipped = True, self._length, 0

    def pause(self) -> None:
        """None is made."""
        self.goes_on, self.skipped = False, self.skipped + 1

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
            share = UNKNOWN if sure is None or math.isnan(sure) else sure
            index, above = min(int(share * BINS), BINS - 1), new[parent]
            chance = at_odds(self._was[index] / self._could[index], factor)
            value = (nodes[above].value if above >= 0 else 1.0) * chance
            new[node] = len(nodes)
            self._children[above].append((token, new[node], index))
            nodes.append(Node(token, above, value, 1.0 if sure is None else sure))  # the policy "confidence" keeps it
        return nodes

    def learn(self, committed: Sequence[int], all_rows: DepthRates) -> None:
        """Compares the draft with the tokens that were committed, down to the last that was decided."""
        self._length += len(committed)
        right, at, decided = 0, ABSENT, 0
        for own in committed:
            after = self._children.get(at)
            if after is None:
                break
            decided += 1
            for token, node, index in after:
                self._was[index] = MEMORY * self._was[index] + (token == own)
                self._could[index] = MEMORY * self._could[index] + 1.0
                at = node if token == own else at
            if all(token != own for token, _, _ in after):
                break
            right += 1
        for rates in (self.rates, all_rows):
            rates.learn(right=right, decided=decided)
        self._children = {}


class Calibration:
    """The calibrations of all rows of a batch for one drafter.

    Args:
        is_slow: whether half a draft takes half the time, so that drafts whose times are unknown should not be much
            longer than is accepted.
        reads: see `Drafter`.
    """

    def __init__(self, *, is_slow: bool, reads: Callable[[int], int] = int) -> None:
        self._is_slow, self._reads = is_slow, reads
        self._rows: list[RowCalibration] = []
        self._rates = DepthRates()
        """Of all rows, those that have left too."""
        self._answer = ANSWER
        """Mean number of tokens of the answers that have left."""
        self._times = DraftTimes()
        self._plain_s = self._saved_s = 0.0
        """Time of a plain round, or 0; time that trials may take."""
        self._gains = RestGains()
        """Of drafts, in tokens beyond their time; 0 where they do not pay."""
        self._drafting = self._unread = self._tried = self._depth = 0
        """In this round the number of drafting rows, of tokens that they read first, of rows that are tried, and the
        depth of the draft."""

    def start(self) -> None:
        """Drops all rows."""
        self.keep([])

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows."""
        self._rows += [
            RowCalibration(
                length=(length := len(request.tokens)),
                limit=request.max_new_tokens - request.answered,
                left_out=length - self._reads(length),
            )
            for request in requests
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops and reorders rows."""
        for number, row in enumerate(self._rows):
            if number not in rows and row.answered:
                self._answer += CHANGE * (row.answered - self._answer)
        self._rows = [self._rows[row] for row in rows]

    def save(self, row: int) -> int:
        """The number of tokens of a row that the drafter has read."""
        return self._rows[row].read

    def restore(self, row: int, read: int, shared: int) -> None:
        """The drafter has read `read` tokens of another row, and the first `shared` are those of this row."""
        self._rows[row].read = max(self._rows[row].read, min(read, shared))

    def lengths(self, lengths: Sequence[int], expected: Sequence[float], plain_s: float) -> list[int]:
        """The largest depth of each row's draft: 0 where it is not worth its time beside the other drafts.

        Args:
            lengths: the largest depths that are asked for.
            expected: accepted tokens of the other drafts.
            plain_s: time of a plain round of all rows, in seconds; 0 if it is unknown. Then nothing depends on times
                or on other rows.
        """
        self._plain_s, others = plain_s, self._rates if plain_s else None
        self._drafting = self._unread = self._tried = self._depth = 0
        is_timed = bool(plain_s) and self._times.are_known
        wanted = {row: self._rows[row].rates.accepted(k, others) for row, k in enumerate(lengths) if k}
        depths = {row: self._best_depth(accepted, len(wanted), is_timed) for row, accepted in wanted.items()}
        more = {row: accepted[depths[row]] - expected[row] for row, accepted in wanted.items()}
        rounds = {row: 1.0 + max(more[row], 0.0) + expected[row] for row in wanted}
        drafting = self._by_time(more, rounds, max(depths.values(), default=0)) if is_timed else self._by_rounds(more)
        asked = [0] * len(lengths)
        for number, row in enumerate(self._rows):
            if number not in drafting:
                row.pause()
                continue
            self._drafting, self._unread = self._drafting + 1, self._unread + row.unread
            row.draft()
            asked[number] = depths[number]
            self._depth = max(self._depth, depths[number])
        return asked

    def _best_depth(self, accepted: Sequence[float], rows: int, is_timed: bool) -> int:
        """The depth whose accepted tokens are worth most beyond its time.

        Args:
            accepted: tokens of drafts of each depth, from 0 to the largest.
            rows: that may draft, and share the time.
        """
        most = len(accepted) - 1
        if not is_timed:
            return min(round(accepted[-1]) + 1, most) if self._is_slow else most
        if (other := self._times.depth_to_measure(most)) is not None:
            return other
        per_s = len(self._rows) / self._plain_s / rows
        return max(range(1, most + 1), key=lambda depth: accepted[depth] - per_s * self._times.draft_s(rows, depth))

    def _by_rounds(self, more: Mapping[int, float]) -> list[int]:
        """The rows in which drafts have more accepted tokens, and now and then another one.

        Args:
            more: by row, the accepted tokens that a draft has more than the other drafts.
        """
        drafting = []
        for number, tokens in more.items():
            row, pays = self._rows[number], tokens > 0.0
            is_measurement = bool(self._plain_s) and row.goes_on  # the second draft of an engine
            if pays or is_measurement or row.skipped >= row.again:
                row.again = AGAIN if pays else 2 * row.again
                drafting.append(number)
        return drafting

    def _by_time(self, more: Mapping[int, float], rounds: Mapping[int, float], depth: int) -> list[int]:
        """The rows in which drafts have more accepted tokens than plain rounds commit in their time, and trials.

        The time of a draft is shared by its rows.

        Args:
            more: see `_by_rounds`.
            rounds: by row, the expected tokens of a round.
            depth: of the deepest draft that is wanted.
        """
        self._saved_s = min(self._saved_s + EXPLORE * self._plain_s, MOST_SAVED * self._plain_s)
        per_s = len(self._rows) / self._plain_s
        reading_s = {row: self._times.reading_s * self._rows[row].unread for row in more}
        share = per_s * self._times.draft_s(len(more), depth) / max(len(more), 1)
        gains = {row: max(tokens - share, 0.0) for row, tokens in more.items()}
        now = {row: self._part_now(row, gain, rounds[row]) for row, gain in gains.items()}
        worth = {row: tokens - per_s * reading_s[row] * now[row] for row, tokens in more.items()}
        for number, gain in gains.items():
            self._gains.learn(self._rows[number].answered, gain)
        order = sorted(worth, key=lambda row: -worth[row])
        sums = itertools.accumulate(worth[row] for row in order)
        drafts = (per_s * self._times.draft_s(rows, depth) for rows in itertools.count(1))
        whole = [0.0, *(tokens - time for tokens, time in zip(sums, drafts, strict=False))]
        paying, others = order[: (best := whole.index(max(whole)))], order[best:]
        for number in paying:
            self._rows[number].trial = 0
        tried: list[int] = []
        for number in others:
            row, rows = self._rows[number], len(paying) + len(tried) + 1
            cost_s = TRIAL * self._times.draft_s(rows, depth) / rows + reading_s[number]
            if not row.trial and not tried and cost_s <= self._saved_s:
                row.trial = TRIAL
            if row.trial:
                row.trial -= 1
                tried.append(number)
        self._tried = len(tried)
        return paying + tried

    def _part_now(self, number: int, gain: float, per_round: float) -> float:
        """The part of the time of reading a text that counts in this round: that of its gain in all that follow."""
        row = self._rows[number]
        end = row.answered + min(row.room, self._answer)
        later = self._gains.after(row.answered, end, per_round=per_round, guess=gain)
        return gain / (gain + later) if gain else 0.0

    def add_time(self, seconds: float) -> None:
        """Adds the time of the drafts of this round."""
        if self._plain_s and self._drafting:
            self._times.add(seconds, rows=self._drafting, depth=self._depth, unread=self._unread)
            self._saved_s -= seconds * self._tried / self._drafting
            self._saved_s = max(self._saved_s, -MOST_SAVED * self._plain_s)

    def nodes(self, draft: Draft, lengths: Sequence[int], factor: float) -> list[list[Node]]:
        """The nodes of each row of a draft, no deeper than was asked for; see `RowCalibration.nodes`."""
        unknown = [[None] * draft.tokens.shape[1]] * len(lengths)
        sure = unknown if draft.confidence is None else draft.confidence.tolist()
        rows = zip(self._rows, *draft.lists, sure, lengths, strict=True)
        return [row.nodes(tokens, parents, own, most, factor) for row, tokens, parents, own, most in rows]

    def learn(self, committed: Sequence[Sequence[int]]) -> None:
        """Adds the committed tokens of a round."""
        for row, tokens in zip(self._rows, committed, strict=True):
            row.learn(tokens, self._rates)

"""Length policy `expected`: maximises expected tokens over measured time.

Why it decides by row and node is in docs/decisions.md, 58.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paradraft.core import Draft, Request
from paradraft.decode.lengths.acceptance_shares import AcceptanceShares
from paradraft.decode.lengths.round_costs import RoundCosts
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.ragged import upload
from paradraft.tree import Tree
from paradraft.worth import Worth


@dataclass(frozen=True, kw_only=True)
class NodeBudget:
    """Nodes to draft and expected tokens by row, the target's own included; expected time of the round."""

    nodes: tuple[int, ...]
    tokens: tuple[float, ...]
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / self.seconds


class Expected:
    """Maximises the expected tokens per second; plain decoding while speculation does not pay.

    The nodes of a draft are ordered, the best first, so a draft of n nodes is the first n. If node i is accepted in a
    share a_i of rounds, a round in which row r drafts n_r nodes yields Σ_r (1 + a_1 + … + a_(n_r)) tokens, each row
    with its own shares. Drafted are the nodes whose share reaches a threshold, the same for all rows, and, of a drafter
    that runs a pass for each token of the longest draft, those up to a depth: threshold and depth are those with the
    most expected tokens per second. Drafting begins when that is `GAIN` times the rate without a draft, and goes on
    while it is higher.

    When drafting begins in a row, the drafter first reads its text; this cost is spread over the row's other rounds.

    Exploration: other plans are tried for a round, as long as the time lost stays within `EXPLORE` of all time. A trial
    that pays loses nothing, so another follows at once. The first trial of an engine may be disturbed or unlucky, so
    the first three are short and do not wait until their losses are recovered. Neither do a few plain rounds before a
    plan with drafts, if hardly any were timed: the first after a prompt may be slow. A trial for which the drafter
    reads long texts waits until its time is a small part of that since the last one, unless its row may win more.
    Statistics stay for later batches.

    Args:
        k: most tokens of a draft.
        one_by_one: see `RoundCosts`.
        reading_work: see `RoundCosts`.
        reads: see `Drafter`.
    """

    wants_confidence = False
    runs_plain = True
    worth = Worth()

    GAIN = 1.05
    """Speedup over plain decoding at which drafting begins; above 1 because times and shares are uncertain."""
    MOST_LEFT = 128
    """Largest expected number of remaining tokens of an answer: many end before their limit."""
    EXPLORE = 0.015
    """The share of all time that trials of other plans may lose."""
    WIN = 0.3
    """Share of a row's plain rounds that drafts may save. It is divided by the square of the number of rows R: a row
    has 1/R of a round's time, and drafts pay less often the fuller a pass is."""
    PATIENCE = 256
    """Rounds without a trial after which it is not divided: texts grow, often faster than the time that trials may
    lose."""
    ALMOST = 0.85
    """The best plan with drafts is tried as a whole if its rate is at least this share of plain decoding's."""
    EARLY_TRIES = 3
    """Trials of a new engine that draft for two rounds …"""
    EARLY_SHARE = 4
    """… a fourth of the nodes, …"""
    SOON = 12
    """… with this many plain rounds between them, even if they lose time."""
    CHECK_ROUNDS = 4
    """Plain rounds of such a check; the first is not timed."""
    SURE = 2.0
    """A plan with drafts that is this many times as fast as plain decoding needs no check."""
    EVERY = 6
    """Rounds with drafts after which the plan is recomputed, as it is after trials and when rows join or leave."""
    CANDIDATES = 12
    """Number of thresholds compared; for each of many depths fewer, …"""
    FEWEST = 4
    """… but at least this."""

    def __init__(
        self, k: int, *, one_by_one: bool = False, reading_work: float = 0.0, reads: Callable[[int], int] = int
    ) -> None:
        self.k = k
        self._one_by_one, self._reads = one_by_one, reads
        self._costs = RoundCosts(one_by_one=one_by_one, reading_work=reading_work)
        self._acceptance = AcceptanceShares(k, is_chain=True)
        self._lost_s = 0.0
        self._is_timed = True
        """Whether the time of the last round was known: of those that read prompts it is not."""
        self._early_tries = self._since_try = 0
        self.start(None, is_ragged=True)

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        """Drops all rows; keeps the statistics of times and acceptance."""
        most, is_chain = self.k if tree is None else tree.nodes, tree is None
        if (most, is_chain) != (self._acceptance.most, self._acceptance.is_chain):
            self._acceptance = AcceptanceShares(most, is_chain=is_chain)
        self._acceptance.start()
        self._costs.is_ragged = is_ragged
        self._rows = self._age = self._number_of_tries = 0
        self._unread: list[int] = []
        """By row, the tokens committed since it last drafted, its prompt's included if it never did."""
        self._room: list[int] = []
        self._requested: list[int] = []
        self._drafting: set[int] = set()
        self._forget_plan()

    def join(self, requests: Sequence[Request]) -> None:
        """Adds rows."""
        self._rows += len(requests)
        self._acceptance.join(len(requests))
        self._unread += [self._reads(len(request.tokens)) for request in requests]
        self._room += [request.max_new_tokens - request.answered for request in requests]
        self._forget_plan()

    def keep(self, rows: Tensor) -> None:
        """Drops the other rows."""
        order = rows.tolist()
        self._rows = len(order)
        self._acceptance.keep(order)
        self._unread, self._room = ([row_of[row] for row in order] for row_of in (self._unread, self._room))
        self._drafting = {new for new, row in enumerate(order) if row in self._drafting}
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._plan: NodeBudget | None = None
        self._almost: NodeBudget | None = None
        """The best plan with drafts, if it is only a little slower than plain decoding."""
        self._try: tuple[int, ...] | None = None
        self._rounds_of_try = 0

    def next(self) -> list[int]:
        """See `LengthPolicy`."""
        if not self._costs.knows_plain(self._rows):
            self._requested = [0] * self._rows
            return self._requested
        if self._plan is None or (self._drafting and self._age >= self.EVERY):
            self._age = 0
            self._plan = self._choose()
        self._age += 1
        is_soon = self._since_try >= self.SOON and self._is_early(self._plan)
        is_due = self._lost_s <= 0.0 or is_soon or self._is_doubtful(self._plan)
        if self._try is None and self._is_timed and is_due:
            self._begin_try(self._plan)
        self._requested = list(self._plan.nodes if self._try is None else self._try)
        return self._requested if self._acceptance.is_chain else [self.k if nodes else 0 for nodes in self._requested]

    def _is_early(self, plan: NodeBudget) -> bool:
        """Whether the next trial is one of the first `EARLY_TRIES`, from a plan without drafts, and may pay."""
        return self._early_tries < self.EARLY_TRIES and not any(plan.nodes) and self._may_row_pay(plan)

    def _may_row_pay(self, plan: NodeBudget) -> bool:
        """Whether drafts in one row more would pay if all of them were accepted, as far as times are known."""
        if any(plan.nodes) or not self._costs.knows_drafts:
            return True
        for nodes in (1, self._acceptance.most):
            depth = self._depth([nodes])
            if (self._rows + min(nodes, depth)) / self._costs.seconds(self._rows, [nodes], depth) > plan.rate:
                return True
        return False

    def _is_doubtful(self, plan: NodeBudget) -> bool:
        """Whether a plan drafts because of few plain rounds."""
        if not any(plan.nodes) or self._costs.trusts_plain(self._rows):
            return False
        return plan.rate * self._costs.seconds(self._rows, [], 0) < self.SURE * self._rows

    def _begin_try(self, plan: NodeBudget) -> None:
        is_early = self._is_early(plan)
        nodes, rounds = self._trial_of(plan, is_early=is_early)
        self._number_of_tries += 1
        if self._is_affordable(nodes, plan):
            self._try, self._rounds_of_try = nodes, rounds
            self._since_try = 0
            self._early_tries += is_early

    def _trial_of(self, plan: NodeBudget, *, is_early: bool) -> tuple[tuple[int, ...], int]:
        """Checks a doubtful plan by plain rounds. Else tries the most nodes in one row, fewer if one row cannot pay;
        every other time no drafts at all if some row drafts, and otherwise the best plan with drafts if it is nearly
        as good. The first round of a trial is not timed, so some have two."""
        trial = self._number_of_tries
        short = [row for row, nodes in enumerate(plan.nodes) if nodes < self._acceptance.most]
        if self._is_doubtful(plan):
            return (0,) * self._rows, self.CHECK_ROUNDS
        if any(plan.nodes) and (trial % 2 or not short):
            return (0,) * self._rows, 2
        if self._almost is not None and trial % 2 and self._is_affordable(self._almost.nodes, plan):
            return self._almost.nodes, 2
        # Usually the row in which that costs least.
        is_usual = (trial + 1) % 6
        tried_row = min(short, key=self._unread.__getitem__) if is_usual else short[trial // 6 % len(short)]
        is_short = is_early or not self._may_row_pay(plan)
        most = max(self._acceptance.most // self.EARLY_SHARE, 1) if is_short else self._acceptance.most
        is_long = is_early or not self._costs.knows_drafts or trial % 8 == 0
        nodes = tuple(most if row == tried_row else before for row, before in enumerate(plan.nodes))
        return nodes, 2 if is_long else 1

    def _is_affordable(self, trial: Sequence[int], plan: NodeBudget) -> bool:
        """Whether the texts that a trial reads take no longer than a round, or than trials may lose in the time since
        the last one, or each no longer than its row may win."""
        reading = {
            row: self._reading_s * self._unread[row] / plan.seconds
            for row, nodes in enumerate(trial)
            if nodes and row not in self._drafting
        }
        if sum(reading.values()) <= max(1.0, self.EXPLORE * self._since_try):
            return True
        most = self.WIN / (1 if self._since_try >= self.PATIENCE else self._rows**2)
        # A long text may well go on as long.
        left = {row: min(self._room[row], max(self.MOST_LEFT, self._unread[row])) for row in reading}
        return all(rounds <= most * left[row] for row, rounds in reading.items())

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """See `LengthPolicy`."""
        self._costs.learn_prefill(tokens, seconds)

    def postpone(self, unread: Mapping[int, int]) -> None:
        """See `LengthPolicy`; the time of reading counts as lost in a trial."""
        for row, left in unread.items():
            if self._try is not None:
                self._lost_s += self._costs.reading_s() * max(self._unread[row] - left, 0)
            self._unread[row], self._requested[row] = left, 0

    def cut(self, draft: Draft) -> Draft:
        """Removes the last nodes of a tree, which are not worth their time."""
        if self._acceptance.is_chain or draft.tokens.shape[1] <= min(self._requested):
            return draft
        device = draft.tokens.device
        return draft.where(upload(range(draft.tokens.shape[1]), device) < upload(self._requested, device)[:, None])

    def _choose(self) -> NodeBudget:
        """The best plan over all thresholds of the nodes' shares, and depths where these cost time."""
        shares, drafted = self._acceptance.shares(), self._acceptance.drafted_nodes()
        self._reading_s = self._costs.reading_s()
        sums = [list(itertools.accumulate(row, initial=1.0)) for row in shares]
        plain = self._plan_of([0] * self._rows, sums, drafted)
        if not self._costs.knows_drafts:
            return plain
        rising = [[-share for share in row] for row in shares]
        thresholds = sorted({share for row in shares for share in row})
        most = self._acceptance.most
        depths = range(1, most + 1) if self._one_by_one and self._acceptance.is_chain else [most]
        step = len(thresholds) // max(self.CANDIDATES // len(depths), self.FEWEST) + 1
        counts = [[bisect.bisect_right(row, -threshold) for row in rising] for threshold in thresholds[::step]]
        candidates = {tuple(min(count, depth) for count in of_rows) for depth in depths for of_rows in counts}
        best = max((self._plan_of(nodes, sums, drafted) for nodes in candidates), key=lambda plan: plan.rate)
        is_better = best.rate > plain.rate * (1.0 if self._drafting else self.GAIN)
        if sum(nodes > 0 for nodes in best.nodes) > self._costs.rows_to_try:
            order = sorted(range(self._rows), key=lambda row: -best.tokens[row])[: self._costs.rows_to_try]
            best = self._plan_of([nodes if row in order else 0 for row, nodes in enumerate(best.nodes)], sums, drafted)
            self._age = self.EVERY - 2  # recompute after two rounds, with a new measurement
        self._almost = best if not is_better and best.rate > self.ALMOST * plain.rate else None
        return best if is_better else plain

    def _plan_of(self, nodes: Sequence[int], sums: Sequence[Sequence[float]], drafted: Sequence[float]) -> NodeBudget:
        drafting = [drafted[count] for count in nodes if count]
        seconds = self._costs.seconds(self._rows, drafting, self._depth(nodes))
        tokens = tuple(row[count] for row, count in zip(sums, nodes, strict=True))
        for row, count in enumerate(nodes):
            if count and row not in self._drafting:
                rounds_left = max(min(self._room[row], self.MOST_LEFT) / tokens[row], 1.0)
                seconds += self._reading_s * self._unread[row] / rounds_left
        return NodeBudget(nodes=tuple(nodes), tokens=tokens, seconds=seconds)

    def _depth(self, nodes: Sequence[int]) -> int:
        return max(nodes) if self._acceptance.is_chain else self.k

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """See `LengthPolicy`."""
        # A finished row drafts nothing, and an answer may end at its length limit.
        requested = [nodes if tokens else 0 for nodes, tokens in zip(self._requested, output.tokens, strict=True)]
        drafting = {row for row, nodes in enumerate(requested) if nodes}
        begin = drafting - self._drafting
        is_first = bool(begin) or bool(drafting) != bool(self._drafting)
        self._drafting = drafting
        if time is not None:
            self._costs.learn(
                self._rows,
                [output.nodes[row] for row in sorted(drafting)],
                self._depth(requested),
                time,
                unread=sum(self._unread[row] for row in begin),
                is_first=is_first,
                is_usual=self._try is None,
            )
        for row, tokens in enumerate(output.tokens):
            self._unread[row] = len(tokens) + (0 if row in drafting else self._unread[row])
            self._room[row] -= len(tokens)
        if drafting:
            rows = zip(requested, output.nodes, output.finished, strict=True)
            could = [drafted if is_finished else nodes for nodes, drafted, is_finished in rows]
            if any(could):
                self._acceptance.learn(could, output.nodes, output.paths)
        self._is_timed = time is not None
        if self._plan is None:
            return
        if time is None:
            if self._try is not None:
                self._give_up_try([nodes for nodes in output.nodes if nodes])
            return
        seconds = self._costs.of_usual(time.total_s)
        if self._try is None:
            self._since_try += 1
            self._lost_s = max(self._lost_s - self.EXPLORE * seconds, 0.0)
            return
        # The tokens of the other rows do not depend on the trial.
        usual = zip(self._plan.nodes, self._try, self._plan.tokens, output.paths, strict=True)
        more = sum(1 + len(path) - tokens for nodes, tried, tokens, path in usual if nodes != tried)
        lost_s = seconds - self._plan.seconds - more / self._plan.rate
        self._lost_s = max(self._lost_s + lost_s, 0.0)
        self._rounds_of_try -= 1
        if not self._rounds_of_try:
            if lost_s < 0.0:
                self._number_of_tries -= 1
            self._try, self._plan = None, None

    def _give_up_try(self, nodes: Sequence[int]) -> None:
        """Ends a trial whose time is unknown; it has lost what such a round is expected to."""
        assert self._plan is not None
        seconds = 2.0 * self._plan.seconds
        if self._costs.knows_drafts:
            seconds = self._costs.seconds(self._rows, nodes, self._depth(nodes) if nodes else 0)
        self._lost_s += max(seconds - self._plan.seconds, 0.0)
        self._try, self._plan = None, None

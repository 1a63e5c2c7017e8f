"""Cuts by value: the best of all, and speeds near those of a policy that knows all times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from paradraft.core import Draft
from paradraft.decode.lengths.round_costs import RoundCosts
from paradraft.decode.lengths.valued_drafts import ValuedDrafts, most_worth
from paradraft.decode.stats import RoundTime
from paradraft.drafters.parts.estimating import at_odds, chain_of
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT, Tree
from tests.support.decoding import requests, round_of

CPU = torch.device("cpu")


def steps(tokens: float) -> float:
    """A pass whose time rises with every fourth token."""
    return 1.0 + 0.25 * (tokens - 1) + 0.5 * ((tokens - 1) // 4)


def flat(tokens: float) -> float:
    return 1.0 + 0.01 * (tokens - 1)


def test_the_cut_is_the_best_of_all() -> None:
    """Guards cuts of batches, against the rates of all subsets, with times that rise in steps."""
    chooser = random.Random(1)
    for _ in range(40):
        values = [sorted((chooser.random() for _ in range(chooser.randint(0, 4))), reverse=True) for _ in range(2)]
        kept, rate = most_worth(values, lambda nodes: steps(2 + sum(nodes)))
        rates = [
            (2 + sum(sum(row[:count]) for row, count in zip(values, counts, strict=True))) / steps(2 + sum(counts))
            for counts in itertools.product(*(range(len(row) + 1) for row in values))
        ]
        assert rate == pytest.approx(max(rates))
        own = [sum(row[:count]) for row, count in zip(values, kept, strict=True)]
        assert (2 + sum(own)) / steps(2 + sum(kept)) == pytest.approx(rate)


@pytest.mark.parametrize("rows", [1, 3])
def test_no_draft_pays_below_the_least_value(rows: int) -> None:
    """Guards drafts that the drafter leaves out: none of them would have been verified; at it, one may be."""
    chooser = random.Random(rows)
    for _ in range(200):
        sizes = sorted(chooser.sample((1, 2, 4, 7, 12, 20), chooser.randint(1, 5)))
        costs, plain_s = RoundCosts(), 1.0
        times_s = [plain_s, *(plain_s + chooser.random() * size for size in sizes)]
        for size, seconds in zip([0, *sizes], sorted(times_s), strict=True):
            costs.learn(
                rows, [size] * bool(size), 8, RoundTime(draft_s=0.0, verify_s=seconds, other_s=0.1),
                unread=0, is_first=False, is_usual=False,
            )  # fmt: skip
        least = rows * costs.least_more(rows)

        def seconds_of(nodes: Sequence[int]) -> float:
            return costs.pass_s(rows, [count for count in nodes if count])  # noqa: B023  # called at once

        below, above = ([[least * share] * max(sizes)] + [[]] * (rows - 1) for share in (0.999, 1.001))
        assert most_worth(below, seconds_of)[0] == [0] * rows
        assert sum(most_worth(above, seconds_of)[0]) > 0


class Run:
    """Decoding of a row whose drafts have known values and whose passes have known times."""

    def __init__(
        self, policy: ValuedDrafts, target_s: Callable[[float], float], *, disturbed: Sequence[int] = ()
    ) -> None:
        self.policy, self.target_s, self.disturbed = policy, target_s, disturbed
        self.slow: Callable[[int], float] = lambda number: 1.0
        """How many times as long a round takes."""
        self.draft_s = 0.0
        self.chooser = random.Random(0)
        self.kept: list[int] = []
        self.least: list[float] = []
        """The values below which the drafter grew nothing."""
        self.tokens, self.seconds, self.rounds, self.ideal = 0, 0.0, 0, 0.0
        policy.start(None, is_ragged=True)
        policy.join(requests([[1]]))

    def run(self, rounds: int, drafts: Sequence[Sequence[float]], right: float = 1.0) -> None:
        """Rounds with drafts of these values in turn, of which the share `right` is accepted as estimated."""
        for index in range(rounds):
            (k,) = self.policy.next()
            chances = [now / before for before, now in itertools.pairwise([1.0, *drafts[index % len(drafts)]])][:k]
            factor, least = self.policy.worth.factor, self.policy.worth.least_value
            self.least.append(least)
            nodes_of_draft = chain_of([1] * len(chances), [at_odds(chance, factor) for chance in chances])
            values = [node.value for node in nodes_of_draft if node.value >= least]
            nodes = self.policy.cut(Draft.of_lists([[1] * len(values)], values=[values])).tokens.shape[1]
            come_true = itertools.takewhile(lambda chance: self.chooser.random() < chance * right, chances)
            accepted = min(reached := len(list(come_true)), nodes)
            output = round_of([accepted], [nodes])
            output.tokens[0][-1] = int(reached > nodes)  # the target's token is the next of the draft, or another
            seconds = self.target_s(1 + nodes)
            self.rounds += 1
            slow = 10.0 if self.rounds in self.disturbed else self.slow(self.rounds)
            self.policy.observe(output, RoundTime(draft_s=self.draft_s, verify_s=slow * seconds, other_s=0.0))
            self.kept.append(nodes)
            self.tokens += 1 + accepted
            self.seconds += seconds

    @property
    def speed(self) -> float:
        """Tokens per second, as a multiple of plain decoding's."""
        return self.tokens / self.seconds * self.target_s(1)


SURE, UNSURE = [0.95**depth for depth in range(1, 9)], [0.2, 0.05, 0.01, 0.01]


def best(drafts: Sequence[Sequence[float]], target_s: Callable[[float], float]) -> float:
    """The speed of the best cuts of these drafts, in turn."""
    rates = [most_worth([draft], lambda nodes: target_s(1 + sum(nodes)))[0] for draft in drafts]
    counts = [sum(kept) for kept in rates]
    tokens = sum(1 + sum(draft[:count]) for draft, count in zip(drafts, counts, strict=True))
    return tokens / sum(target_s(1 + count) for count in counts) * target_s(1)


@pytest.mark.parametrize("target_s", [steps, flat])
@pytest.mark.parametrize("drafts", [[SURE], [SURE, UNSURE, UNSURE], [UNSURE], [[0.6, 0.3], SURE, []]])
def test_it_is_nearly_as_fast_as_with_all_times_known(
    target_s: Callable[[float], float], drafts: list[list[float]]
) -> None:
    run = Run(ValuedDrafts(8), target_s)
    run.run(600, drafts)
    assert run.speed > 0.95 * best(drafts, target_s)


def test_useless_drafts_cost_next_to_nothing() -> None:
    """Guards values that are too low to pay, and that are right."""
    run = Run(ValuedDrafts(8), steps)
    run.run(600, [UNSURE])
    assert run.speed > 0.97 and sum(map(bool, run.kept)) < 30


def test_drafters_need_not_grow_what_never_pays() -> None:
    """Guards the drafter's time: where a token costs a quarter of a pass nothing below is asked for, except every 16th
    round, in which a size that was never tried may be, and in trials; where tokens are nearly free all values are."""
    run, free = Run(ValuedDrafts(8), steps), Run(ValuedDrafts(8), flat)
    for each in (run, free):
        each.run(400, [SURE, UNSURE])
    late = run.least[200:]
    assert late.count(0.0) in (12, 13) and sum(least > 0.15 for least in late) > 0.8 * len(late)
    assert max(late) < 0.4 and max(free.least[200:]) < 0.05


def test_a_disturbed_first_pass_is_tried_again() -> None:
    """Guards the first draft, which took ten times as long as usual: drafts still begin to pay soon."""
    run = Run(ValuedDrafts(8), flat, disturbed=(3, 4))
    run.run(400, [SURE])
    assert run.speed > 0.9 * best([SURE], flat)


@pytest.mark.parametrize("target_s", [steps, flat])
@pytest.mark.parametrize("right", [0.0, 0.25, 0.5])
def test_values_that_do_not_come_true_cost_little(target_s: Callable[[float], float], right: float) -> None:
    """Guards texts that repeat themselves by chance, such as random digits: the drafter is sure, and wrong."""
    run = Run(ValuedDrafts(8), target_s)
    run.run(1500, [[0.92**depth for depth in range(1, 9)]], right)
    assert run.speed > 0.97
    early = Run(ValuedDrafts(8), target_s)
    early.run(40, [[0.92**depth for depth in range(1, 9)]], right)
    assert early.speed > 0.75


def test_drafts_that_take_too_long_pause() -> None:
    """Guards a drafter that takes as long as two passes, which no cut of its drafts can mend."""
    policy, drafted = ValuedDrafts(8), 0
    policy.start(None, is_ragged=True)
    policy.join(requests([[1]]))
    for _ in range(400):
        (k,) = policy.next()
        values = [SURE[:1]] if k else [[]]
        draft = policy.cut(
            Draft(**vars(Draft.chain(torch.ones(1, len(values[0]), dtype=torch.long))) | {"values": values})
        )
        nodes = draft.tokens.shape[1]
        time = RoundTime(draft_s=2.0 * bool(k), verify_s=flat(1 + nodes), other_s=0.0)
        policy.observe(round_of([nodes], [nodes]), time)
        drafted += bool(k)
    assert drafted < 60


def test_a_long_pause_ends() -> None:
    """Guards texts that begin to repeat after thousands of rounds: plain rounds have a small time for the drafter, too,
    which must not count as a loss of drafts."""
    run = Run(ValuedDrafts(8), steps)
    run.draft_s = 0.02
    run.run(3000, [[0.92**depth for depth in range(1, 9)]], 0.0)
    run.run(1500, [SURE])
    assert sum(map(bool, run.kept[-300:])) > 200


@pytest.mark.parametrize("factor", [2.0, 4.0])
@pytest.mark.parametrize("last", [8, 20, 40])
def test_a_disturbed_beginning_is_forgotten(factor: float, last: int) -> None:
    """Guards bursts of other work over the first measurements of several sizes."""
    run = Run(ValuedDrafts(8), steps)
    run.slow = lambda number: factor if 3 <= number <= last else 1.0
    run.run(600, [SURE])
    late = Run(run.policy, steps)
    late.run(600, [SURE])
    assert late.speed > 0.85 * best([SURE], steps)


def test_sizes_are_doubled_at_most() -> None:
    """Guards a large K: no pass has more than twice the tokens of those before it, and the first few."""
    run = Run(ValuedDrafts(256), steps)
    run.run(100, [[0.33 * 0.99**depth for depth in range(256)]], 0.1)
    largest = 2
    for nodes in run.kept:
        assert nodes <= 2 * largest
        largest = max(largest, nodes + 1)
    assert run.speed > 0.8


def test_plain_rounds_are_timed_now_and_then() -> None:
    """Guards the comparison with plain decoding, and a machine that becomes slower for wide passes alone."""
    run = Run(ValuedDrafts(8), flat)
    run.run(800, [SURE])
    plain = [index for index, kept in enumerate(run.kept) if not kept]
    assert 8 <= len(plain) <= 20 and all(index + 1 in plain or index - 1 in plain for index in plain)


def test_rows_share_a_pass() -> None:
    """Guards batches: the row that is sure drafts, the other row does not, and padding stays absent."""
    policy = ValuedDrafts(4)
    policy.start(None, is_ragged=True)
    policy.join(requests([[1], [2]]))
    values = [[0.9, 0.8, 0.7], [0.1]]
    draft = Draft(tokens=from_lists([[5, 6, 7], [8]], CPU), parents=from_lists([[-1, 0, 1], [-1]], CPU), values=values)
    seen = []
    for _ in range(60):
        is_drafting = any(policy.next())
        drafted = policy.cut(draft) if is_drafting else Draft.empty(2, CPU)
        nodes = [sum(token != ABSENT for token in row) for row in drafted.lists[0]]
        seconds = 1.0 + 0.2 * sum(nodes)
        policy.observe(round_of([min(nodes[0], 2), 0], nodes), RoundTime(draft_s=0.0, verify_s=seconds, other_s=0.0))
        seen.append(drafted.lists[0])
    assert seen.count([[5, 6, 7], [ABSENT] * 3]) > 40


class Rows:
    """Decoding of many rows; a pass takes as long as it has tokens, and the drafter's time for each row is given."""

    def __init__(self, policy: ValuedDrafts, rows: int, *, draft_s: float) -> None:
        self.policy, self.rows, self.draft_s = policy, rows, draft_s
        self.chooser = random.Random(0)
        self.kept: list[int] = []
        self.tokens, self.seconds = 0, 0.0
        policy.start(None, is_ragged=True)
        policy.join(requests([[1]] * rows))

    def run(self, rounds: int, value: float, right: float) -> None:
        """Rounds in which a drafter promises every fourth row a token with this chance; the share `right` comes."""
        for _ in range(rounds):
            is_asked = any(self.policy.next())
            chance = at_odds(value, self.policy.worth.factor)
            values = [[chance] if is_asked and row % 4 == 0 else [] for row in range(self.rows)]
            draft = self.policy.cut(Draft.of_lists([[1] * len(row) for row in values], values=values))
            nodes = [sum(token != ABSENT for token in row) for row in draft.lists[0]] or [0] * self.rows
            is_right = [self.chooser.random() < right for _ in nodes]
            output = round_of([int(node and right) for node, right in zip(nodes, is_right, strict=True)], nodes)
            for row, tokens in enumerate(output.tokens):
                tokens[0] = int(is_right[row])  # the drafted token, or another
            seconds = 1.0 * (self.rows + sum(nodes))
            time = RoundTime(draft_s=self.draft_s * self.rows * is_asked, verify_s=seconds, other_s=0.0)
            self.policy.observe(output, time)
            self.kept.append(sum(nodes))
            self.tokens += sum(map(len, output.tokens))
            self.seconds += seconds + time.draft_s


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_a_few_tokens_among_many_rows_are_not_free(right: float) -> None:
    """Guards batches whose passes take as long as they have tokens: 33 tokens are nearly as many as 32, yet the one
    more costs all that it can bring."""
    many = Rows(ValuedDrafts(8), 32, draft_s=0.0)
    many.run(400, 0.9, right)
    assert many.tokens / many.seconds > 0.985 and sum(many.kept[200:]) < 100


def test_many_rows_pause_sooner_than_one() -> None:
    """Guards large batches, whose luck is small: a drafter that takes a twentieth of a pass and brings nothing is left
    alone nearly always, and so is one that takes a fiftieth."""
    for draft_s in (0.05, 0.02):
        many = Rows(ValuedDrafts(8), 32, draft_s=draft_s)
        many.run(2000, 0.3, 0.0)
        assert many.tokens / many.seconds > 0.989


def test_a_batch_of_other_texts_tries_drafts_again() -> None:
    """Guards one client after a text without repetitions: its next text need not wait for the end of a long pause."""
    run = Run(ValuedDrafts(8), steps)
    run.run(1500, [[0.92**depth for depth in range(1, 9)]], 0.0)
    while not run.policy.worth.pause > 64:
        run.run(1, [SURE], 0.0)
    late = Run(run.policy, steps)
    late.run(100, [SURE])
    assert sum(map(bool, late.kept)) > 60
    while not late.policy.worth.pause:
        late.run(1, [SURE], 0.0)
    again = Run(late.policy, steps)
    again.run(20, [SURE], 0.0)
    assert sum(map(bool, again.kept)) < 5  # they may lose a round, not five


def test_losses_of_many_rows_are_not_those_of_one() -> None:
    policy = ValuedDrafts(8)
    many = Rows(policy, 32, draft_s=0.5)
    many.run(400, 0.9, 0.0)
    while not policy.worth.pause:
        many.run(1, 0.9, 0.0)
    policy.keep(torch.tensor([0]))
    assert not policy.worth.pause


def test_one_client_whose_texts_repeat_late_drafts_again() -> None:
    """Guards pauses that a new text interrupts: where its first drafts fail too, the rest of the pause follows, and
    not a longer one, which would last until the next text fails."""
    run = Run(ValuedDrafts(8), steps)
    run.run(600, [[0.92**depth for depth in range(1, 9)]], 0.0)
    drafted = 0
    for _ in range(20):
        text = Run(run.policy, steps)
        text.run(20, [SURE], 0.0)
        text.run(280, [SURE])
        drafted += sum(text.kept[20:])
    assert drafted > 20 * 280  # a node a round; eight would be all


@pytest.mark.parametrize("rounds", [8, 20, 64])
def test_short_texts_of_useless_drafts_cost_little(rounds: int) -> None:
    """Guards one client whose answers are short: not each of them interrupts a pause."""
    run = Run(ValuedDrafts(8), steps)
    run.run(600, [[0.92**depth for depth in range(1, 9)]], 0.0)
    tokens, seconds = 0, 0.0
    for _ in range(1200 // rounds):
        text = Run(run.policy, steps)
        text.run(rounds, [SURE], 0.0)
        tokens, seconds = tokens + text.tokens, seconds + text.seconds
    assert tokens / seconds > 0.98


def test_a_pause_passes_while_others_run() -> None:
    """Guards rounds that read prompts too, whose times are not told, and batches of other sizes."""
    run = Run(ValuedDrafts(8), steps)
    while not run.policy.worth.pause > 20:
        run.run(1, [SURE], 0.0)
    for _ in range(10):
        run.policy.next()
        run.policy.observe(round_of([0], [0]), None)
    left = run.policy.worth.pause
    run.policy.join(requests([[1]] * 7))
    for _ in range(left - 1):
        run.policy.next()
        run.policy.observe(round_of([0] * 8, [0] * 8), RoundTime(draft_s=0.0, verify_s=8.0, other_s=0.0))
    run.policy.keep(torch.tensor([0]))
    assert run.policy.worth.pause == 1 and left < 32


def test_rounds_of_unknown_time_are_no_trials() -> None:
    """Guards busy servers, whose rounds nearly all read prompts: each of them tried a large draft, because no trial
    ever ended."""
    run = Run(ValuedDrafts(8), steps)
    run.run(100, [UNSURE])
    kept = 0
    for _ in range(200):
        (k,) = run.policy.next()
        values = [UNSURE[:k]]
        kept += run.policy.cut(Draft.of_lists([[1] * len(values[0])], values=values)).tokens.shape[1]
        run.policy.observe(round_of([0], [0]), None)
    assert kept <= 4  # the first round, whose time might have been known


def test_plain_rounds_are_told_their_time() -> None:
    """Guards draft models in unions, whose next trial waits for a share of all time, that of pauses too."""
    run = Run(ValuedDrafts(8), steps)
    while not run.policy.worth.pause:
        run.run(1, [SURE], 0.0)
    run.policy.next()
    assert run.policy.worth.plain_s > 0.5


def test_equal_values_keep_ancestors() -> None:
    """Guards the order: a parent comes before its child, and its row's others."""
    kept, _ = most_worth([[0.5, 0.5, 0.5]], lambda nodes: 1.0 + (0.3, 0.5, 0.6, 9.0)[sum(nodes)])
    assert kept == [2]


def test_a_drafter_without_values_is_left_alone() -> None:
    policy = ValuedDrafts(4)
    policy.start(Tree(budget=3), is_ragged=True)
    policy.join(requests([[1]]))
    draft = Draft.chain(torch.ones(1, 3, dtype=torch.long))
    assert policy.cut(draft) is draft

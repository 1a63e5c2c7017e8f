from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from paradraft.core import Draft
from paradraft.decode.lengths.expected_length import Expected
from paradraft.decode.lengths.round_costs import PassTimes, RoundCosts
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT, Tree
from tests.support.decoding import requests, round_of
from tests.support.simulated_rounds import Cost, Simulated, flat, many_passes, one_pass, steep


@pytest.mark.parametrize(
    ("chance", "draft_s", "token_s"), [(0.8, 0.1, 0.0), (0.5, 0.05, 0.05), (0.9, 0.0, 0.0), (0.3, 0.02, 0.1)]
)
def test_the_best_length_is_found(chance: float, draft_s: float, token_s: float) -> None:
    """Guards the choice itself, against trying out all lengths: what it asks for most is within 3 % of the best."""
    simulated = Simulated(
        Expected(8), 1, lambda tokens: 1.0 + token_s * (tokens - 1), lambda rows, depth: draft_s * depth
    )
    simulated.run(400, [chance])

    def speed(k: int) -> float:
        return sum(chance**i for i in range(k + 1)) / (1.0 + (draft_s + token_s) * k)

    late = [asked[0] for asked in simulated.asked[100:]]
    assert speed(max(set(late), key=late.count)) > 0.97 * max(map(speed, range(9)))


def test_times_that_were_measured_long_ago_count_little_and_not_nothing() -> None:
    """Guards the fit of a server that runs for days: two old groups out of order once had no weight at all."""
    times = PassTimes(fade=True)
    for size, seconds in [(2, 3.0), (4, 2.0), *[(8, 4.0)] * 20_000, (2, 3.0)]:
        times.add(size, seconds)
    assert times.of(2) == times.of(4) == pytest.approx(3.0) and times.of(8) == 4.0


def test_a_usual_pass_keeps_its_weight() -> None:
    """Guards the target's times against fading: a usual pass says how slow the machine is, and is not added again."""
    costs, time = RoundCosts(), RoundTime(draft_s=0.0, verify_s=1.0, other_s=0.0)
    for is_usual, rows, seconds in [(False, 5, 1.0)] * 12 + [(True, 5, 1.0)] * 50 + [(False, 4, 1.2)] * 12:
        costs.learn(rows, [], 0, replace(time, verify_s=seconds), unread=0, is_first=False, is_usual=is_usual)
    assert costs.seconds(5, [], 0) == pytest.approx(1.1)


def behind_channel(message_s: float, rows: int, depth: int) -> float:
    """A drafter on another machine."""
    return message_s + 0.1 * depth


def test_drafts_behind_a_channel_are_as_long_as_it_is_slow() -> None:
    """Guards a drafter on another machine (FlexSpec's case), where a message belongs to the time of a draft: a slower
    channel takes longer drafts, and one that outweighs them none. Once the time of a usual draft was never measured
    again, and drafting went on at half the speed of plain decoding. A channel that is fast again is used again."""
    simulated = Simulated(Expected(8), 1, lambda tokens: 1.0 + 0.03 * (tokens - 1), many_passes)
    usual = []
    for message_s, rounds in ((0.0, 400), (0.7, 400), (5.0, 100), (0.0, 2500)):
        simulated.draft_s = partial(behind_channel, message_s)
        simulated.run(rounds, [0.8])
        late = [asked[0] for asked in simulated.asked[-50:]]
        usual.append(max(set(late), key=late.count))
    assert 3 <= usual[0] <= 5 and usual[0] < usual[1] and usual[2] == 0 and usual[3]


@pytest.mark.parametrize("draft_s", [one_pass, many_passes])
@pytest.mark.parametrize("target_s", [flat, steep])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_batch_is_about_as_fast_as_with_the_best_length(
    rows: int, chance: float, target_s: Callable[[int], float], draft_s: Cost
) -> None:
    """Guards what all choices together are worth, tries included: after learning, at least nine tenths of the speed of
    the best constant length, and of plain decoding 97 %."""
    simulated = Simulated(Expected(8), rows, target_s, draft_s, noise=0.02)
    simulated.run(200, [chance] * rows)
    simulated.tokens, simulated.seconds = 0, 0.0
    simulated.run(400, [chance] * rows)

    def speed(k: int) -> float:
        seconds = target_s(rows * (k + 1)) + (draft_s(rows, k) if k else 0.0)
        return sum(chance**i for i in range(k + 1)) / seconds * target_s(rows)

    simulated.seconds /= 1.016  # the mean of the noise
    assert simulated.speed > max(0.97, 0.9 * max(map(speed, range(1, 9))))


@pytest.mark.parametrize("draft_s", [one_pass, many_passes, lambda rows, depth: 1.0 * depth, lambda rows, depth: 0.01])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_drafts_that_are_never_accepted_cost_little(rows: int, draft_s: Cost) -> None:
    """Guards the promise that speculation which does not pay is not paid for, whatever a draft costs: in 128 rounds,
    those of learning included, it loses 5 %, and later 2 %."""
    simulated = Simulated(Expected(8), rows, steep, draft_s)
    simulated.run(128, [0.0] * rows)
    if draft_s(1, 8) < 4.0:
        assert simulated.speed > 0.95
    simulated.tokens, simulated.seconds = 0, 0.0
    simulated.run(1000, [0.0] * rows)
    assert simulated.speed > 0.98


@pytest.mark.parametrize("draft_s", [one_pass, many_passes])
def test_a_disturbed_first_try_is_made_up_for(draft_s: Cost) -> None:
    """Guards the first answer of an engine on a busy machine, where every tenth time is ten times as long: once tries
    had to earn back what those had taken, a fifth of the engines hardly drafted in 128 tokens."""
    hardly = 0
    for seed in range(100):
        simulated = Simulated(Expected(8), 1, steep, draft_s, noise=0.05)
        simulated.disturbed, simulated.chooser = 0.1, random.Random(seed)
        while simulated.tokens < 128:
            simulated.run(1, [0.9])
        hardly += sum(map(any, simulated.asked)) < 0.15 * len(simulated.asked)
    assert hardly <= 4


@pytest.mark.parametrize(("rows", "within"), [(1, 60), (4, 80), (16, 100)])
def test_drafting_comes_back_when_it_pays_again(rows: int, within: int) -> None:
    """Guards a policy that has once given up: after 300 rounds of text in which nothing is accepted, rows draft again
    soon after most of it would be, and go on."""
    simulated = Simulated(Expected(8), rows, flat, one_pass, noise=0.02)
    simulated.run(300, [0.0] * rows)
    assert sum(map(sum, simulated.asked[200:])) < 0.1 * 100 * rows * 8
    simulated.run(within, [0.9] * rows)
    simulated.run(100, [0.9] * rows)
    assert sum(map(sum, simulated.asked[-100:])) > 0.8 * 100 * rows * 8


def test_each_row_drafts_as_much_as_it_is_worth() -> None:
    """Guards a batch whose rows are unlike: those whose drafts are accepted draft, and the others need not wait."""
    simulated = Simulated(Expected(8), 8, steep, lambda rows, depth: 0.05)
    simulated.run(600, [0.95] * 4 + [0.0] * 4)
    nodes = [sum(asked[row] for asked in simulated.asked[300:]) / 300 for row in range(8)]
    assert min(nodes[:4]) > 4 and max(nodes[4:]) < 1


def unlike_rows(*, compares_depths: bool) -> float:
    """The speed of two rows, one of which accepts nearly all, with a drafter of a pass for each token."""
    speeds = []
    for seed in range(4):
        policy = Expected(5, one_by_one=True)
        policy._one_by_one = compares_depths
        simulated = Simulated(policy, 2, lambda tokens: 0.023 + 0.0008 * tokens, lambda rows, depth: 0.0105 * depth)
        simulated.chooser = random.Random(seed)
        simulated.run(60, [0.6, 0.97])
        simulated.tokens, simulated.seconds = 0, 0.0
        simulated.run(300, [0.6, 0.97])
        speeds.append(simulated.speed)
    return sum(speeds) / len(speeds)


def test_depths_are_compared_where_each_takes_a_pass() -> None:
    """Guards batches of unlike rows, where no threshold of all rows drafts them equally deep: what a deeper draft of
    one row costs, the other has for nothing."""
    assert unlike_rows(compares_depths=True) > 1.02 * unlike_rows(compares_depths=False)


def test_what_rows_leave_is_not_what_others_get() -> None:
    """Guards what is known of a row when others leave and join: it moves with it, and a new row has none of it."""
    simulated = Simulated(Expected(8), 4, steep, lambda rows, depth: 0.05)
    simulated.run(400, [0.95, 0.95, 0.0, 0.0])
    simulated.policy.keep(torch.tensor([3, 1]))
    after = simulated.policy.next()
    assert after[0] <= 1 and after[1] > 4


def test_a_pass_as_long_as_its_longest_row_is_so_expected() -> None:
    """Guards passes that compute absent tokens too: drafting in one row then costs what it costs in all, so all rows
    draft alike or none does."""
    policy = Expected(8)
    policy.start(None, is_ragged=False)
    policy.join(requests([[1]] * 4))
    asked = []
    chooser = random.Random(0)
    for _ in range(400):
        lengths = policy.next()
        accepted = [sum(1 for _ in range(length) if chooser.random() < 0.2) for length in lengths]
        verify_s = steep(4 * (1 + max(lengths)))
        time = RoundTime(draft_s=0.05 * any(lengths), verify_s=verify_s, other_s=0.0)
        policy.observe(round_of(accepted, lengths), time)
        asked.append(lengths)
    assert sum(map(any, asked[100:])) < 0.05 * 300


def test_a_machine_that_slows_down_misleads_nobody() -> None:
    """Guards against times of one length from a fast minute held against times of another from a slow one:
    speculation never pays here, however slow the machine, and tries lose no more than 2 % of the time."""
    simulated = Simulated(Expected(8), 1, lambda tokens: 1.0 + 0.15 * (tokens - 1), lambda rows, depth: 1.5)
    for number in range(3000):
        if number == 100:
            simulated.tokens, simulated.seconds = 0, 0.0
        simulated.slowness = 1 + number / 1000 + number // 60 % 2
        simulated.run(1, [0.7])
    assert simulated.speed >= 0.98


def test_rounds_of_unknown_time_are_no_trials() -> None:
    """Guards busy servers, whose rounds nearly all read prompts: a trial went on until one did not."""
    tried = []
    for before in range(100):
        simulated = Simulated(Expected(8), 4, steep, lambda rows, depth: 0.3)
        simulated.run(before, [0.0] * 4)
        asked = list[list[int]]()
        for _ in range(10):
            asked.append(list(simulated.policy.next()))
            simulated.policy.observe(round_of([0] * 4, asked[-1]), None)
        tried.append(sum(map(any, asked)))
    assert max(tried) == 1  # the first round, whose time might have been known


def test_drafts_may_be_less_deep_than_asked_for() -> None:
    """Guards trees and prompt lookup: they often draft less than k, and must not be asked for k for ever."""
    simulated = Simulated(Expected(8), 1, steep, lambda rows, depth: 0.3)
    simulated.run(400, [0.0], deepest=3)
    assert sum(map(sum, simulated.asked[40:])) < 0.05 * 360 * 8
    simulated = Simulated(Expected(8), 1, flat, lambda rows, depth: 0.01)
    simulated.run(300, [1.0], deepest=3)
    assert sum(asked[0] >= 3 for asked in simulated.asked[40:]) >= 0.95 * 260


def test_what_was_learnt_stays() -> None:
    """Guards learning everything anew for every request and batch size."""
    policy = Expected(8)
    Simulated(policy, 8, flat, one_pass).run(200, [0.0] * 8)
    again = Simulated(policy, 8, flat, one_pass)
    again.run(20, [0.0] * 8)
    assert sum(map(sum, again.asked)) <= 16
    Simulated(policy, 8, flat, one_pass).run(300, [0.9] * 8)
    again = Simulated(policy, 8, flat, one_pass)
    again.run(20, [0.9] * 8)
    assert sum(map(sum, again.asked)) > 0.7 * 20 * 64


def test_a_batch_that_shrinks_or_grows_has_times_of_its_own() -> None:
    """Guards a large batch that drafts because drafting pays for a small one, and the other way round."""
    policy = Expected(8)
    for _ in range(2):
        for rows, pays in [(1, True), (16, False)]:
            simulated = Simulated(policy, rows, steep, lambda rows, depth: 0.1 + 0.02 * rows * depth)
            simulated.run(150, [0.6] * rows)
            drafted = sum(map(sum, simulated.asked[50:])) / (100 * rows * 8)
            assert drafted > 0.2 if pays else drafted < 0.03


def test_a_row_that_has_ended_teaches_nothing() -> None:
    """Guards the shares against rows that are read on after their end, of which nothing can be accepted."""
    policy = Expected(4)
    policy.start(None, is_ragged=True)
    policy.join(requests([[1]] * 4))
    for _ in range(200):
        lengths = policy.next()
        drafted = [*lengths[:2], 0, 0]
        output = round_of([*lengths[:2], 0, 0], drafted, ended=2)
        policy.observe(output, RoundTime(draft_s=0.01, verify_s=1.0 + 0.01 * sum(drafted), other_s=0.0))
    assert policy.next()[:2] == [4, 4]


def tree_round(asked: list[int], chances: Sequence[float], chooser: random.Random) -> RoundOutput:
    """A round of trees of siblings, one of which at most is accepted: node i with its chance."""
    paths = []
    for number in asked:
        draw, total, path = chooser.random(), 0.0, []
        for node, chance in enumerate(chances[:number]):
            if total <= draw < total + chance:
                path = [node]
            total += chance
        paths.append(path)
    rows = len(asked)
    return RoundOutput(
        requests=list(range(rows)), tokens=[[1] * (len(path) + 1) for path in paths], accepted=list(map(len, paths)),
        drafted=[min(number, 1) for number in asked], nodes=asked, paths=paths, finished=[False] * rows,
    )  # fmt: skip


@pytest.mark.parametrize("pieces", [0, 3, 40])
def test_a_row_that_reads_first_drafts_later(pieces: int) -> None:
    """Guards long texts: rounds in which their drafter reads must not count as drafts that were refused."""
    policy = Expected(8)
    simulated = Simulated(policy, 2, flat, one_pass)
    simulated.run(200, [0.9, 0.9])
    policy.join(requests([[1] * 500]))
    simulated.rows = 3
    asked_to_read = 0
    while asked_to_read < pieces:
        asked = list(policy.next())
        drafted = [*asked[:2], 0]
        if asked[2]:
            asked_to_read += 1
            policy.postpone({2: 500 - 500 * asked_to_read // pieces})
        time = None if asked[2] else RoundTime(draft_s=0.0, verify_s=1.0, other_s=0.0)
        policy.observe(round_of(drafted, drafted), time)
    simulated.asked.clear()
    simulated.run(300, [0.9, 0.9, 0.9])
    assert sum(asked[2] > 0 for asked in simulated.asked[-100:]) > 90


@pytest.mark.parametrize(("token_s", "best"), [(0.001, range(6, 9)), (0.08, range(1, 4)), (0.5, range(1))])
def test_a_tree_has_as_many_nodes_as_pay(token_s: float, best: range) -> None:
    """Guards the budget of trees: nodes are worth what they add, so an expensive target gets the first ones and one
    that waits for memory all."""
    policy, chooser = Expected(4), random.Random(0)
    policy.start(Tree(budget=8), is_ragged=True)
    policy.join(requests([[1]] * 2))
    numbers = []
    for _ in range(500):
        lengths = policy.next()
        assert set(lengths) <= {0, 4}
        draft = policy.cut(Draft.chain(from_lists([[1] * 8 if length else [] for length in lengths])))
        asked = (draft.tokens != ABSENT).sum(1).tolist()
        output = tree_round(asked, [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.0], chooser)
        policy.observe(output, RoundTime(draft_s=0.02, verify_s=1.0 + token_s * (2 + sum(asked)), other_s=0.0))
        numbers += asked
    usual = max(set(numbers[400:]), key=numbers[400:].count)
    assert usual in best, numbers[-40:]


def test_a_clock_that_stands_still_is_no_error() -> None:
    """Guards small models on machines with coarse clocks: rates divide by times."""
    policy = Expected(4)
    policy.start(None, is_ragged=True)
    policy.join(requests([[1]] * 2))
    for _ in range(50):
        lengths = policy.next()
        policy.observe(round_of(lengths, lengths), RoundTime(draft_s=0.0, verify_s=0.0, other_s=0.0))

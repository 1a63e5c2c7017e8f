from __future__ import annotations

import random

import pytest
import torch

from paradraft.core import Draft, RoundOutput
from paradraft.decode.draft_length import POLICIES, Confidence, Heuristic, LengthPolicy
from paradraft.decode.expected_length import Expected
from paradraft.tree import ABSENT


def step(accepted: list[int], drafted: list[int]) -> RoundOutput:
    rows = len(accepted)
    return RoundOutput(
        requests=list(range(rows)), tokens=[[1] * (a + 1) for a in accepted], accepted=accepted, drafted=drafted,
        nodes=drafted, finished=[False] * rows,
    )  # fmt: skip


def begin(policy: LengthPolicy, rows: int) -> None:
    """A batch of so many rows."""
    policy.start()
    policy.join(rows)


def test_heuristic_grows_and_shrinks_each_row() -> None:
    """Guards rows that share one length: each grows by its own success, and keeps its length when others leave."""
    policy = Heuristic(8)
    begin(policy, 3)
    assert policy.next() == 4
    policy.observe(step([4, 3, 0], [4, 4, 4]), draft_s=0.0, verify_s=0.0)
    assert policy.next() == 6
    draft = policy.cut(Draft.chain(torch.arange(18).view(3, 6)))
    assert (draft.tokens != ABSENT).sum(1).tolist() == [6, 3, 3]
    policy.keep(torch.tensor([1, 2]))
    assert policy.next() == 3
    for _ in range(9):
        policy.observe(step([0, 0], [3, 3]), draft_s=0.0, verify_s=0.0)
    assert policy.next() == 1
    policy.observe(step([0, 0], [0, 0]), draft_s=0.0, verify_s=0.0)
    assert policy.next() == 1, "a round without a draft says nothing"
    for _ in range(9):
        policy.observe(step([1, 1], [1, 1]), draft_s=0.0, verify_s=0.0)
    assert policy.next() == 8


def test_confidence_cuts_before_the_first_unsure_place() -> None:
    """Guards against nodes kept behind one that was cut, and against cutting drafters that do not say."""
    policy = Confidence(4, threshold=0.5)
    chain = Draft.chain(
        torch.tensor([[1, 2, 3, 4]] * 3), confidence=torch.tensor([[0.9, 0.4, 0.9, 0.9], [0.9] * 4, [0.1] * 4])
    )
    assert policy.cut(chain).tokens.tolist() == [[1, *[ABSENT] * 3], [1, 2, 3, 4], [ABSENT] * 4]
    tree = Draft(
        tokens=torch.tensor([[1, 2, 3, 4]]), parents=torch.tensor([[-1, -1, 0, 1]]),
        confidence=torch.tensor([[0.9, 0.9, 0.6, 0.4]]),
    )  # fmt: skip
    assert policy.cut(tree).tokens.tolist() == [[1, 2, 3]]
    silent = Draft.chain(torch.tensor([[1, 2]]))
    assert policy.cut(silent) is silent
    with pytest.raises(ValueError, match=r"threshold 1\.5"):
        Confidence(4, threshold=1.5)


def simulate(
    policy: Expected, *, chance: float, draft_s: float, token_s: float, rounds: int = 400, deepest: int = 99
) -> list[int]:
    """Rounds with a constant chance of acceptance and constant costs, drafts as deep as asked for but not deeper than
    `deepest`; returns the lengths that were asked for."""
    generator = torch.Generator().manual_seed(0)
    asked = []
    for _ in range(rounds):
        asked.append(policy.next())
        k = min(asked[-1], deepest)
        right = torch.rand(k, generator=generator) < chance
        accepted = int(right.long().cumprod(0).sum())
        costs = draft_s * k, 1.0 + token_s * k
        policy.observe(step([accepted], [k]), draft_s=costs[0], verify_s=costs[1])
    return asked


@pytest.mark.parametrize(
    ("chance", "draft_s", "token_s"), [(0.8, 0.1, 0.0), (0.5, 0.05, 0.05), (0.9, 0.0, 0.0), (0.3, 0.02, 0.1)]
)
def test_expected_finds_the_best_length(chance: float, draft_s: float, token_s: float) -> None:
    """Guards the choice itself, against trying out all lengths: what it asks for most is within 3 % of the best."""
    policy = Expected(8)
    begin(policy, 1)
    asked = simulate(policy, chance=chance, draft_s=draft_s, token_s=token_s)

    def speed(k: int) -> float:
        return sum(chance**i for i in range(k + 1)) / (1.0 + (draft_s + token_s) * k)

    usual = max(set(asked[100:]), key=asked[100:].count)
    assert speed(usual) > 0.97 * max(map(speed, range(9)))


def test_expected_decodes_plainly_while_speculation_does_not_pay() -> None:
    """Guards the promise never to be slower than plain decoding: drafts that are never accepted cost 1 % of the
    time, whatever each of them costs, and drafting comes back when it pays again."""
    for draft_s in (0.01, 1.0, 0.1):
        policy = Expected(8)
        begin(policy, 1)
        asked = simulate(policy, chance=0.0, draft_s=draft_s, token_s=0.05, rounds=1000)
        assert sum(asked[40:]) * (draft_s + 0.05) <= 0.015 * 960
    asked = simulate(policy, chance=1.0, draft_s=0.01, token_s=0.0, rounds=2000)
    assert asked[-20:].count(8) >= 19


def test_expected_is_not_misled_by_a_machine_that_slows_down() -> None:
    """Guards against times of one length from a fast minute held against times of another from a slow one: speculation
    never pays here, however slow the machine, and tries lose no more than 2 % of the time."""
    policy = Expected(8)
    begin(policy, 1)
    generator = torch.Generator().manual_seed(0)
    tokens = seconds = 0.0
    for number in range(3000):
        k = policy.next()
        accepted = int((torch.rand(k, generator=generator) < 0.7).long().cumprod(0).sum())
        cost = 1.0 + (1.5 if k else 0.0) + 0.15 * k
        policy.observe(step([accepted], [k]), draft_s=0.0, verify_s=cost * (1 + number / 1000 + number // 60 % 2))
        if number >= 100:
            tokens, seconds = tokens + 1 + accepted, seconds + cost
    assert tokens / seconds >= 0.98, "plain decoding yields 1"


def test_expected_learns_from_drafts_that_are_less_deep_than_asked_for() -> None:
    """Guards trees and prompt lookup: they often draft less than k, and must not be asked for k for ever."""
    policy = Expected(8)
    begin(policy, 1)
    asked = simulate(policy, chance=0.0, draft_s=0.1, token_s=0.05, rounds=300, deepest=3)
    assert sum(min(k, 3) for k in asked[40:]) * 0.15 <= 0.015 * 260
    policy = Expected(8)
    begin(policy, 1)
    asked = simulate(policy, chance=1.0, draft_s=0.01, token_s=0.01, rounds=300, deepest=3)
    assert sum(k >= 3 for k in asked[40:]) >= 0.98 * 260


def test_expected_learns_each_batch_size_and_keeps_it() -> None:
    """Guards the costs of one batch size taken for another's, and learning everything anew for every request."""
    policy = Expected(4)
    begin(policy, 8)
    for _ in range(30):
        k = policy.next()
        policy.observe(step([0] * 8, [k] * 8), draft_s=1.0 * k, verify_s=1.0)
    assert policy.next() == 0
    begin(policy, 1)
    assert policy.next() == 4, "a new batch size is tried out"
    begin(policy, 8)
    assert policy.next() == 0


def test_expected_does_not_learn_anew_whenever_a_row_leaves() -> None:
    """Guards the last rounds of a batch against trials: a smaller batch goes on with what the larger one knows, and one
    that begins so small learns for itself."""
    policy = Expected(4)
    begin(policy, 8)
    for rows in (8, 8, 4, 2):
        policy.keep(torch.arange(rows))
        for _ in range(30):
            k = policy.next()
            policy.observe(step([0] * rows, [k] * rows), draft_s=1.0 * k, verify_s=1.0)
            assert rows == 8 or k == 0
    begin(policy, 2)
    assert policy.next() == 4, "costs that were lent do not stay"


def test_rows_that_join_have_lengths_of_their_own() -> None:
    """Guards rows that join later: they begin as in a batch of their own, and what the others have learnt stays."""
    policy = Heuristic(8)
    begin(policy, 2)
    policy.observe(step([4, 0], [4, 4]), draft_s=0.0, verify_s=0.0)
    policy.join(1)
    draft = policy.cut(Draft.chain(torch.arange(18).view(3, 6)))
    assert (draft.tokens != ABSENT).sum(1).tolist() == [6, 3, 4]
    policy.keep(torch.tensor([2, 0]))
    draft = policy.cut(Draft.chain(torch.arange(12).view(2, 6)))
    assert (draft.tokens != ABSENT).sum(1).tolist() == [4, 6], "in another order"
    begin(policy, 1)
    assert policy.next() == 4, "and another batch begins anew"


def test_a_batch_that_grows_has_the_costs_of_its_size() -> None:
    """Guards against a large batch that drafts because drafting pays for a small one: rows that join one by one are
    as if they had begun together, and the costs of the smaller batch stay known."""
    policy = Expected(4)
    policy.start()
    for rows in range(1, 9):
        policy.join(1)
        for _ in range(60):
            k = policy.next()
            paying, futile = (0.01 * k, 1.0), (3.0 * k, 1.0)
            draft_s, verify_s = paying if rows == 1 else futile
            policy.observe(step([k] * rows, [k] * rows), draft_s=draft_s, verify_s=verify_s)
        assert (policy.next() > 0) == (rows == 1)
    begin(policy, 1)
    assert policy.next() == 4


@pytest.mark.parametrize("name", POLICIES)
def test_rows_may_join_between_any_two_rounds(name: str) -> None:
    """Guards every policy against rows that come and go: what it says fits the rows that there are."""
    policy, chooser = POLICIES[name](5), random.Random(0)
    policy.start()
    rows = 0
    for _ in range(200):
        if not rows:
            policy.start()
        joining = chooser.choice([0, 0, 0, 1, 3]) or int(not rows)
        if joining:
            policy.join(joining)
        rows += joining
        k = policy.next()
        assert 0 <= k <= 5
        draft = policy.cut(Draft.chain(torch.ones(rows, k, dtype=torch.long)))
        drafted = (draft.tokens != ABSENT).sum(1).tolist()
        assert len(drafted) == rows
        policy.observe(step([chooser.randint(0, most) for most in drafted], drafted), draft_s=0.1 * k, verify_s=1.0)
        staying = [row for row in range(rows) if chooser.random() < 0.8]
        chooser.shuffle(staying)
        if 0 < len(staying) < rows:
            policy.keep(torch.tensor(staying))
        rows = len(staying)

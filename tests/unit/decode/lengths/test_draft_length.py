from __future__ import annotations

import random

import pytest
import torch

from paradraft.core import Draft
from paradraft.decode.lengths.draft_length import POLICIES, Confidence, Heuristic, LengthPolicy
from paradraft.decode.stats import RoundTime
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT, Tree
from tests.support.decoding import requests, round_of


def observe(policy: LengthPolicy, accepted: list[int], drafted: list[int]) -> None:
    """A round of chains of which these numbers of tokens were accepted."""
    policy.observe(round_of(accepted, drafted), RoundTime(draft_s=0.1 * max(drafted), verify_s=1.0, other_s=0.0))


def begin(policy: LengthPolicy, rows: int) -> None:
    """A batch of so many rows."""
    policy.start(None, is_ragged=True)
    policy.join(requests([[1]] * rows))


def test_heuristic_grows_and_shrinks_each_row() -> None:
    """Guards rows that share one length: each grows by its own success, and keeps its length when others leave."""
    policy = Heuristic(8)
    begin(policy, 3)
    assert policy.next() == [4, 4, 4]
    observe(policy, [4, 3, 0], [4, 4, 4])
    assert policy.next() == [6, 3, 3]
    policy.keep(torch.tensor([1, 2]))
    assert policy.next() == [3, 3]
    for _ in range(9):
        observe(policy, [0, 0], [3, 3])
    assert policy.next() == [1, 1]
    observe(policy, [0, 0], [0, 0])
    assert policy.next() == [1, 1], "a round without a draft says nothing"
    for _ in range(9):
        observe(policy, [1, 1], [1, 1])
    assert policy.next() == [8, 8]


def test_confidence_cuts_before_the_first_unsure_place() -> None:
    """Guards against nodes kept after one that was cut, and against cutting drafters that do not say."""
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


def test_rows_that_join_have_lengths_of_their_own() -> None:
    """Guards rows that join later: they begin as in a batch of their own, and what the others have learnt stays."""
    policy = Heuristic(8)
    begin(policy, 2)
    observe(policy, [4, 0], [4, 4])
    policy.join(requests([[1]]))
    assert policy.next() == [6, 3, 4]
    policy.keep(torch.tensor([2, 0]))
    assert policy.next() == [4, 6], "in another order"
    begin(policy, 1)
    assert policy.next() == [4], "and another batch begins anew"


@pytest.mark.parametrize("tree", [None, Tree(budget=7)])
@pytest.mark.parametrize("name", POLICIES)
def test_rows_may_join_between_any_two_rounds(name: str, tree: Tree | None) -> None:
    """Guards every policy against rows that come and go: what it says fits the rows that there are."""
    policy, chooser = POLICIES[name](5), random.Random(0)
    policy.start(tree, is_ragged=True)
    rows = 0
    for _ in range(200):
        if not rows:
            policy.start(tree, is_ragged=True)
        joining = chooser.choice([0, 0, 0, 1, 3]) or int(not rows)
        if joining:
            policy.join(requests([[1]] * joining))
        rows += joining
        lengths = policy.next()
        assert len(lengths) == rows and all(0 <= length <= 5 for length in lengths)
        nodes = [length if tree is None else 7 * bool(length) for length in lengths]
        draft = policy.cut(Draft.chain(from_lists([[1] * number for number in nodes])))
        drafted = (draft.tokens != ABSENT).sum(1).tolist()
        observe(policy, [chooser.randint(0, most) for most in drafted], drafted)
        staying = [row for row in range(rows) if chooser.random() < 0.8]
        chooser.shuffle(staying)
        if 0 < len(staying) < rows:
            policy.keep(torch.tensor(staying))
        rows = len(staying)

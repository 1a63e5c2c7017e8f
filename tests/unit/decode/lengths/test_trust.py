"""Trust in chances: the factor of their odds that makes them come true, per part."""

from __future__ import annotations

import random

import pytest

from paradraft.core import Draft
from paradraft.decode.lengths.trust import Trust
from paradraft.drafters.parts.estimating import at_odds


def rounds(trust: Trust, said: float, true: float, *, part: int = 0, number: int = 600) -> float:
    """The mean chance over the last third of rounds with one node, of which the share `true` is right."""
    chooser, last = random.Random(1), []
    for index in range(number):
        chance = at_odds(said, trust.odds.get(part, 1.0))
        draft = Draft.of_lists([[5]], values=[[chance]], parts=[[part]])
        trust.learn(draft, [[5 if chooser.random() < true else 6]])
        if index >= number - number // 3:
            last.append(chance)
    return sum(last) / len(last)


@pytest.mark.parametrize(("said", "true"), [(0.33, 0.1), (0.6, 0.35), (0.3, 0.5), (0.9, 0.75), (0.4, 0.4)])
def test_chances_become_those_that_come_true(said: float, true: float) -> None:
    """Guards drafts of a model whose texts repeat less, or more, than those that the fits were made of."""
    assert rounds(Trust(), said, true) == pytest.approx(true, abs=0.07)


def test_parts_are_trusted_apart() -> None:
    """Guards a good proposer beside a bad one."""
    trust = Trust()
    bad, good = rounds(trust, 0.6, 0.2, part=1), rounds(trust, 0.6, 0.6)
    assert bad < 0.3 and good > 0.5


def test_what_never_comes_true_is_still_seen() -> None:
    """Guards drafters that would leave out, and so never judge again, what they once were wrong about."""
    assert 0.05 < rounds(Trust(), 0.33, 0.0) < 0.1


def test_a_chance_of_nothing_that_comes_true() -> None:
    """Guards a plugin that says 0, and is right."""
    trust = Trust()
    trust.learn(Draft.of_lists([[5, 6]], values=[[0.0, 0.0]]), [[5, 6]])
    assert trust.odds[0] > 1


def test_nodes_are_judged_when_their_turn_comes() -> None:
    """Guards against nodes below a refused one, which say nothing, and for those that were not verified: all of the
    tree along the committed text counts, siblings too."""
    draft = Draft.of_lists(
        [[5, 6, 7, 8]], [[-1, -1, 0, 1]], values=[[0.5, 0.4, 0.3, 0.2]], parts=[[0, 1, 2, 3]]
    )  # fmt: skip
    trust = Trust()
    trust.learn(draft, [[5, 9]])
    assert set(trust.odds) == {0, 1, 2}, "8 is below 6, which was not committed"
    assert trust.odds[0] > 1 > trust.odds[1] and trust.odds[2] < 1
    unread = Trust()
    unread.learn(draft, [[5]])
    assert set(unread.odds) == {0, 1}
    unread.learn(Draft.empty(1, draft.tokens.device), [[5]])
    assert set(unread.odds) == {0, 1}

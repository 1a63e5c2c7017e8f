"""What all rules keep that draw with separate random numbers and are lossless, by enumeration."""

from __future__ import annotations

import pytest
import torch

from paradraft.core import Draft, TargetOut
from paradraft.tree import ABSENT
from paradraft.verify import load_rule, rule_class, rule_names
from tests.support.enumeration import SHAPES, Scripted, largest_error, possible_drafts

RULES = [name for name in rule_names() if rule_class(name).draws == "numbers" and rule_class(name).warning is None]


def test_the_rules() -> None:
    """Control: the tests below are of these."""
    assert RULES == ["block", "rejection"]


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_is_the_targets(rule: str, shape: str, sampled: bool) -> None:
    """Guards losslessness: every text has exactly the probability that plain decoding gives it."""
    assert largest_error(load_rule(rule), shape, sampled=sampled) < 1e-12


@pytest.mark.parametrize("q", [None, [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
@pytest.mark.parametrize("rule", RULES)
def test_what_the_target_never_says_is_never_accepted(rule: str, q: list[float] | None) -> None:
    """Guards tokens that top-k cuts or a bias forbids against the random number 0, and against a drafter that calls
    its own token impossible."""
    p_BMV = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    script = Scripted(p_BMV, torch.zeros(1, 1, dtype=torch.float64))
    probs = None if q is None else torch.tensor([[q]], dtype=torch.float64)
    draft = Draft(tokens=torch.tensor([[0]]), parents=torch.tensor([[ABSENT]]), probs=probs)
    assert load_rule(rule)(draft, TargetOut(logits=p_BMV.log(), hidden={}), script).paths == [[]]
    assert script.left_BV[0, 0] == 0.0


@pytest.mark.parametrize("rule", RULES)
def test_a_rejection_that_cannot_be_leaves_the_target(rule: str) -> None:
    """Guards answers against an end in NaN: where p = q nothing is left after a rejection, which only rounding, here
    of the random number to 1, can bring about."""
    p = [0.25, 0.0, 0.75]
    p_BMV = torch.tensor([[p, [1.0, 0.0, 0.0]]], dtype=torch.float64)
    script = Scripted(p_BMV, torch.ones(1, 1, dtype=torch.float64))
    draft = Draft(tokens=torch.tensor([[2]]), parents=torch.tensor([[ABSENT]]), probs=p_BMV[:, :1])
    assert load_rule(rule)(draft, TargetOut(logits=p_BMV.log(), hidden={}), script).paths == [[]]
    assert script.left_BV.tolist() == [p]


def test_something_is_accepted_and_something_rejected() -> None:
    """Control of the enumeration: it goes through acceptance, rejection and the bonus token."""
    drafts = possible_drafts("tree", sampled=True)
    assert len(drafts) > 20
    assert sum(draft.weight for draft in drafts) == pytest.approx(1.0)

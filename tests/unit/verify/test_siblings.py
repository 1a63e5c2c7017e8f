"""Siblings of one depth: what the rule accepts, against the most that any rule can, and against rules of papers."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
import torch

from paradraft.verify import block, rejection
from tests.support import multi_draft
from tests.support.enumeration import distribution, mean_accepted, p_of, q_of


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def like_models(seed: int) -> tuple[list[float], list[float]]:
    """A sure p, and a q that is near it."""
    number = random.Random(seed)
    logits = [number.gauss(0, 2) for _ in range(5)]
    return softmax(logits), softmax([logit + number.gauss(0, 0.7) for logit in logits])


CASES = {
    "any": [(distribution(kind, ()), distribution(kind + 100, ())) for kind in range(40)],
    "like models": [like_models(seed) for seed in range(40)],
}
SHARES = {"any": {1: 1.0, 2: 0.925, 3: 0.935}, "like models": {1: 1.0, 2: 0.956, 3: 0.984}}
"""The share of the optimum that recursive rejection reaches, by number of siblings."""


@pytest.mark.parametrize("rule", [rejection, block])
def test_both_rules_accept_siblings_by_recursive_rejection(rule: object) -> None:
    """Guards the reference: it accepts as often as the rules themselves."""
    expected = multi_draft.without_replacement(p_of(()), q_of(()), 3)
    assert mean_accepted(rule.verify, "three siblings") == pytest.approx(expected, abs=1e-12)  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("kind", CASES)
def test_shares_of_the_optimum(kind: str, number: int) -> None:
    """Guards the figures of docs/losslessness.md: one sibling is accepted with 1 - TV, which is optimal; of several the
    rule accepts more than SpecTr's K-SEQ and greedy siblings, and less than the best rule for such draws could."""
    sums: Counter[str] = Counter()
    for p, q in CASES[kind]:
        found = {
            "rule": multi_draft.without_replacement(p, q, number),
            "optimum": multi_draft.optimum(p, q, number),
            "with replacement": multi_draft.optimum(p, q, number, replacement=True),
            "k-seq": multi_draft.with_replacement(p, q, number),
            "greedy": multi_draft.greedy(p, q, number),
        }
        assert found["rule"] <= found["optimum"] + 1e-12
        assert found["k-seq"] <= found["with replacement"] + 1e-12
        assert found["k-seq"] >= (1 - (1 - 1 / number) ** number) * found["with replacement"] - 1e-9
        if number == 1:
            assert found["rule"] == pytest.approx(sum(map(min, p, q))) == pytest.approx(found["optimum"])
        sums.update(found)
    assert sums["rule"] / sums["optimum"] == pytest.approx(SHARES[kind][number], abs=0.001)
    if number > 1:
        assert sums["rule"] > max(sums["k-seq"], sums["greedy"])


def test_the_likeliest_siblings_are_accepted_as_often_as_the_target_says_them() -> None:
    """Guards trees that grow: for tokens that are chosen and not drawn the rule is optimal, so no other gains."""
    for p, q in itertools.chain(*CASES.values()):
        likeliest = sorted(range(len(q)), key=lambda token: -q[token])[:2]
        certain = [[float(token == each) for token in range(len(q))] for each in likeliest]
        assert multi_draft.accepted(p, likeliest, certain) == pytest.approx(sum(p[token] for token in likeliest))


def test_greedy_siblings_are_at_most_optimal() -> None:
    """Guards the reference of Hu et al. 2025 that benchmarks compare with: a drawn last sibling only adds."""
    for p, q in itertools.chain(*CASES.values()):
        chosen = sorted(range(len(q)), key=lambda token: -q[token])[:1]
        assert multi_draft.greedy(p, q, 2) >= sum(p[token] for token in chosen) - 1e-12
        assert multi_draft.greedy(p, q, 1) == pytest.approx(sum(map(min, p, q)))


def test_shares_in_benchmarks_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the share of the optimum in tables of real models, which is computed by sorting, for any p and q."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "scripts"))
    script = import_module("sibling_rules")
    lists = [*itertools.chain(*CASES.values())]
    lists += [([0.0, *p], [*q, 0.0]) for p, q in lists] + [([*p, 0.0], [*q, 0.0]) for p, q in lists[:5]]
    for p, q in lists:
        p_V, q_V = (torch.tensor(each, dtype=torch.float64) for each in (p, q))
        assert script.accepted_of_two(p_V, q_V) == pytest.approx(multi_draft.without_replacement(p, q, 2), abs=1e-9)
        assert script.most_of_two(p_V, q_V) == pytest.approx(multi_draft.optimum(p, q, 2), abs=1e-9)

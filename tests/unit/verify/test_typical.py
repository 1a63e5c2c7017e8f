"""Typical acceptance: what it keeps, how far its text is from the target's, and that this is said."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paradraft.audit.audit import audit
from paradraft.core import Draft, Request, TargetOut
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.verify import load_rule, rule_name
from paradraft.verify.typical import Typical

V = 6
EXACT = Runtime(dtype="float64", compiled=False)


def target_of(seed: int, *, sharpness: float) -> tuple[Tensor, Tensor]:
    """Random logits `[V]` of a first token and `[V, V]` of a second one after each first one."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(V, generator=generator), torch.randn(V, V, generator=generator)
    return sharpness * first.double(), sharpness * second.double()


def joint(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """The target's distribution `[V, V]` of two tokens."""
    if not temperature:
        found = torch.zeros(V, V, dtype=torch.float64)
        token = int(first.argmax())
        found[token, int(second[token].argmax())] = 1
        return found
    return (first / temperature).softmax(0)[:, None] * (second / temperature).softmax(1)


def typical_joint(first: Tensor, second: Tensor, temperature: float, rule: Typical, drafted: list[int]) -> Tensor:
    """The distribution `[V, V]` of two tokens when siblings are drafted for the first place, and nothing for the
    second: one that is typical is taken for certain, the likeliest of several."""
    p = joint(first, second, temperature).sum(1)
    least = min(rule.epsilon, rule.delta * math.exp(float(torch.special.xlogy(p, p).sum())))
    kept = [token for token in drafted if p[token] > least]
    if not kept:
        return joint(first, second, temperature)
    taken = max(kept, key=lambda token: float(p[token]))
    after = joint(first, second, temperature)[taken]
    found = torch.zeros(V, V, dtype=torch.float64)
    found[taken] = after / after.sum() if temperature else torch.nn.functional.one_hot(second[taken].argmax(), V)
    return found


@cache
def seeded(temperature: float, seeds: int) -> list[Request]:
    """Requests that differ in nothing but their seeds."""
    samplings = [Sampling(temperature=temperature, seed=seed) for seed in range(seeds)]
    return [Request(tokens=[1], sampling=sampling) for sampling in samplings]


def drawn_joint(
    first: Tensor, second: Tensor, temperature: float, rule: Typical, drafted: list[int], seeds: int
) -> Tensor:
    """The same, counted over seeds, of the rule itself."""
    sampler = Sampler(seeded(temperature, seeds))
    tokens = torch.tensor([drafted]).expand(seeds, -1)
    draft = Draft(tokens=tokens, parents=torch.full_like(tokens, -1))
    logits = torch.stack([first, *(second[token] for token in drafted)]).expand(seeds, -1, -1)
    verdict = rule(draft, TargetOut(logits=logits, hidden={}), sampler)
    found = torch.zeros(V, V, dtype=torch.float64)
    # Where nothing was kept the second token is the target's own of the next round.
    both = joint(first, second, temperature)
    after = both / both.sum(1, keepdim=True)
    for begun, count in Counter(tuple(tokens[:2]) for tokens in verdict.tokens).items():
        if len(begun) == 1:
            found[begun[0]] += count * after[begun[0]]
        else:
            found[begun] += count
    return found / seeds


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("drafted", [[0], [3, 1], [5, 0, 2]])
@pytest.mark.parametrize("rule", [Typical(), Typical(epsilon=0.4, delta=0.8), Typical(epsilon=1.0, delta=1.0)])
def test_the_distribution_is_the_enumerated_one(temperature: float, drafted: list[int], rule: Typical) -> None:
    """Guards the rule's formula, and states how far its text is from the target's: the total variation of two tokens'
    joint distribution, by enumeration, is 0 when greedy and above 0 when something is taken that is not certain.
    Bound of the counts: 5 standard deviations of each of 36 cells."""
    seeds = 4000 if temperature else 1
    for seed in range(3):
        first, second = target_of(seed, sharpness=1.5)
        expected = typical_joint(first, second, temperature, rule, drafted)
        found = drawn_joint(first, second, temperature, rule, drafted, seeds)
        bound = 5 * (expected * (1 - expected) / seeds).sqrt() + 1e-9
        assert bool(((found - expected).abs() <= bound + 5e-4 * (temperature > 0)).all())
        variation = 0.5 * float((expected - joint(first, second, temperature)).abs().sum())
        p = joint(first, second, temperature).sum(1)
        taken = expected.sum(1).max() > 1 - 1e-9 and p.max() < 0.95
        assert (variation > 0.05) == bool(taken) and (temperature or variation == 0)


def test_the_longest_typical_path_is_taken(family: Path) -> None:
    """Guards trees: a likely short path loses against a long one, and of two as long the likelier one wins."""
    logits = torch.full((1, 6, V), -30.0)
    logits[0, 0, 0], logits[0, 0, 1] = 1.0, 0.5  # after the root: 0 is likelier than 1
    logits[0, 1, 5] = 0.0  # after node 0 (token 0) only 5
    logits[0, 2, 2], logits[0, 2, 3] = 0.3, 0.1  # after node 1 (token 1): 2 is likelier than 3
    logits[0, 3:, 4] = 0.0
    tokens, parents = torch.tensor([[0, 1, 3, 2, 4]]), torch.tensor([[-1, -1, 1, 1, 0]])
    sampler = Sampler([Request(tokens=[1], sampling=Sampling(temperature=1.0, seed=1))])
    verdict = Typical()(Draft(tokens=tokens, parents=parents), TargetOut(logits=logits, hidden={}), sampler)
    assert verdict.paths == [[1, 3]] and verdict.tokens == [[1, 2, 4]]


def test_greedy_text_is_the_targets(family: Path) -> None:
    plain = load(str(family / "target"), runtime=EXACT)
    with pytest.warns(UserWarning, match="typical acceptance is not lossless"):
        drafted = Engine(
            plain.target, load(str(family / "target"), drafter="ngram", runtime=EXACT, lengths="fixed").drafter,
            load(str(family / "target"), drafter="ngram", verify="typical", runtime=EXACT, lengths="fixed").speculation,
        )  # fmt: skip
    prompts = ["abcabcabc", "hello"]
    expected = [answer.tokens for answer in plain.generate(prompts, max_new_tokens=20)]
    assert [answer.tokens for answer in drafted.generate(prompts, max_new_tokens=20)] == expected
    assert load_rule("typical").warning is not None


def test_it_cannot_be_audited(family: Path) -> None:
    with pytest.warns(UserWarning, match="not lossless"):
        engine = load(
            str(family / "target"), drafter="ngram", verify="typical:epsilon=0.2", runtime=EXACT, lengths="fixed"
        )
    with pytest.raises(ValueError, match=r"typical:epsilon=0.2': typical acceptance is not lossless.*use match"):
        audit(engine, ["abc"], sampling=Sampling(), seeds=1, max_new_tokens=4, batch_size=1, report=lambda text: None)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("tipical", "verify='tipical': use one of block, judge, match, rejection, typical"),
        ("match:epsilon=1", "'epsilon=1' is no setting=value of it; it has no settings"),
        ("typical:eps=1", "'eps=1' is no setting=value of it; its settings are epsilon, delta, each at most once"),
        ("typical:delta=a", "verify='typical:delta=a': delta='a': use a number"),
        ("typical:delta=0", "delta=0.0: use a number above 0, up to 1"),
        ("typical:delta=nan", "delta=nan: use a number above 0, up to 1"),
    ],
)
def test_rules_that_there_are_not(rule: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_rule(rule)
    assert rule_name("typical:delta=0.5") == "typical"
    assert load_rule("typical:delta=0.5") == Typical(delta=0.5)

"""The rejection rule against the target's joint distribution, by enumeration, and wrong rules that must be caught."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from paradraft.core import INVALID, Draft, TargetOut, Verdict
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from paradraft.verify.rejection import verify
from tests.support import plain_rejection
from tests.support.bonus import with_bonus
from tests.support.decoding import sampler
from tests.support.enumeration import (
    LENGTH,
    SHAPES,
    VOCAB,
    Scripted,
    Verify,
    error_of,
    largest_error,
    p_of,
    path_to,
    possible_drafts,
    q_of,
    spread,
)
from tests.support.trees import random_parents


def softmax_for_argmax(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Tells q for tokens that were chosen deterministically."""
    texts = [
        [tuple(row[i] for i in path_to(shape, parent)) for parent in shape]
        for row, shape in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)
    ]
    probs = torch.tensor([[q_of(text) for text in row] for row in texts], dtype=torch.float64)
    return verify(Draft(tokens=draft.tokens, parents=draft.parents, probs=probs), out, sampler)


def always_accept(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    sampler.chance_BN = torch.full_like(sampler.chance_BN, -1.0)
    return verify(draft, out, sampler)


def bonus_after_rejection(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    return with_bonus(verify(draft, out, sampler), out)


def target_after_rejection(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Draws the recovered token from p instead of what is left of it."""
    verdict = verify(draft, out, sampler)
    after = [path[-1] + 1 if path else 0 for path in verdict.paths]
    sampler.left_BV = sampler.p_BMV[torch.arange(len(after)), after]
    return verdict


def siblings_with_replacement(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Takes the first sibling's distribution for that of all."""
    assert draft.probs is not None
    probs = draft.probs.clone()
    for row, shape in enumerate(draft.parents.tolist()):
        for node, parent in enumerate(shape):
            probs[row, node] = draft.probs[row, shape.index(parent)]
    return verify(Draft(tokens=draft.tokens, parents=draft.parents, probs=probs), out, sampler)


def cut(draft: Draft, is_sure: Callable[[list[float], int], bool]) -> Draft:
    """Removes nodes of which a drafter is not sure, by their distribution and token, and all below them."""
    assert draft.probs is not None
    tokens, probs = draft.tokens.tolist(), draft.probs.tolist()
    are_kept: list[list[bool]] = []
    for row, parents in enumerate(draft.parents.tolist()):
        are_kept.append([])
        for node, parent in enumerate(parents):
            is_after_kept = parent == ABSENT or are_kept[row][parent]
            are_kept[row].append(is_after_kept and is_sure(probs[row][node], tokens[row][node]))
    return Draft(
        tokens=draft.tokens.masked_fill(~torch.tensor(are_kept), ABSENT), parents=draft.parents, probs=draft.probs
    )


def routed_by_distributions(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Leaves a node out where the drafter's distribution is flat, whatever was drawn from it."""
    return verify(cut(draft, lambda q, token: max(q) >= 0.4), out, sampler)


def routed_by_drawn_values(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Leaves a node out where the drawn token has a small probability, as routing between sampled chains by their
    confidence does (TAPS, `ea_model_dual.py`)."""
    return verify(cut(draft, lambda q, token: token == ABSENT or q[token] >= 0.3), out, sampler)


def cut_by_what_follows(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Leaves a token of a chain out where the distribution after it is flat, which depends on the token, as a budget
    for a batch does that also reads the confidences after the tokens that it drops (DSpark, Appendix A)."""
    assert draft.probs is not None
    is_sure_BN = torch.nn.functional.pad(draft.probs[:, 1:].amax(-1) >= 0.4, (0, 1), value=True)
    tokens = draft.tokens.masked_fill(~is_sure_BN.long().cumprod(1).bool(), ABSENT)
    return verify(Draft(tokens=tokens, parents=draft.parents, probs=draft.probs), out, sampler)


def pad_is_zero(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Takes absent nodes for drafts of token 0."""
    return verify(Draft(tokens=draft.tokens.clamp(min=0), parents=draft.parents, probs=draft.probs), out, sampler)


def p_one_row_too_late(draft: Draft, out: TargetOut, sampler: Scripted) -> Verdict:
    """Compares a token with what the target says after it (PEARL, Alg. 2, lines 29 and 32, taken literally)."""
    late = torch.cat([out.logits[:, 1:], out.logits[:, -1:]], dim=1)
    verdict = verify(draft, TargetOut(logits=late, hidden={}), sampler)
    after = [path[-1] + 1 if path else 0 for path in verdict.paths]
    sampler.left_BV = sampler.p_BMV[torch.arange(len(after)), after]
    return verdict


@pytest.mark.parametrize(
    ("wrong", "shape", "sampled"),
    [
        (softmax_for_argmax, "chain", False),
        (softmax_for_argmax, "three siblings", False),  # ParallelSpec's Alg. 1 with its A.3, taken literally
        (softmax_for_argmax, "tree", False),
        (p_one_row_too_late, "one", True),
        (p_one_row_too_late, "chain", True),
        (always_accept, "chain", True),
        (always_accept, "tree", False),
        (bonus_after_rejection, "chain", True),
        (target_after_rejection, "chain", True),
        (target_after_rejection, "tree", False),
        (siblings_with_replacement, "three siblings", True),
        (pad_is_zero, "ragged", True),
        (cut_by_what_follows, "chain", True),
        (routed_by_drawn_values, "chain", True),
        (routed_by_drawn_values, "tree", True),
    ],
)
def test_wrong_rules_are_caught(wrong: Verify, shape: str, sampled: bool) -> None:
    """Control: an enumeration that these rules pass would not guard losslessness."""
    assert largest_error(wrong, shape, sampled=sampled) > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_may_be_cut_by_their_distributions(shape: str) -> None:
    """Guards length policies and routing that look at the drafter's confidence: they may, until a token is drawn."""
    assert largest_error(routed_by_distributions, shape, sampled=True) < 1e-12


def with_one_number(shape: str, *, numbers: int = 500) -> dict[tuple[int, ...], float]:
    """The joint distribution where a draft's tokens are all tried with the same random number (PEARL's public code)."""
    parents, N = SHAPES[shape], len(SHAPES[shape])
    drafts = possible_drafts(shape, sampled=True)
    p = [[p_of(tuple(d.tokens[i] for i in path_to(parents, node))) for node in range(-1, N)] for d in drafts]
    p_BMV = torch.tensor(p, dtype=torch.float64)
    draft = Draft(
        tokens=torch.tensor([draft.tokens for draft in drafts]),
        parents=torch.tensor(parents).expand(len(drafts), N),
        probs=torch.tensor([draft.probs for draft in drafts], dtype=torch.float64),
    )
    begun: Counter[tuple[int, ...]] = Counter()
    for number in range(numbers):
        chance = torch.full((len(drafts), N), (number + 0.5) / numbers, dtype=torch.float64)
        script = Scripted(p_BMV, chance)
        verdict = verify(draft, TargetOut(logits=p_BMV.log(), hidden={}), script)
        for row, drafted in enumerate(drafts):
            start = verdict.tokens[row][: len(verdict.paths[row])]
            for token, chance_of_it in enumerate(script.left_BV[row].tolist()):
                begun[(*start, token)[:LENGTH]] += drafted.weight / numbers * chance_of_it
    joint: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0.0)
    for text, weight in begun.items():
        spread(joint, text, weight)
    return joint


def test_one_number_for_two_tokens_is_caught() -> None:
    """Control: tests of acceptance are independent. With one drafted token there is one number, and no error."""
    errors = {shape: error_of(with_one_number(shape)) for shape in ("one", "chain")}
    assert errors["one"] < 3e-4 and errors["chain"] > 1e-3


@pytest.mark.parametrize("kind", ["sampled chain", "sampled tree", "likeliest tokens"])
def test_it_is_the_plain_rule_to_the_last_bit(kind: str) -> None:
    """Guards texts, which depend on every bit of what is left after a rejection: rows of other shapes and settings,
    absent nodes, guesses that are no token, penalties, and logits that are not numbers."""
    accepted = 0
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        nodes = seed % 7 + 1
        parents = [
            list(range(-1, nodes - 1)) if "chain" in kind else random_parents(seed * 3 + i, nodes) for i in range(3)
        ]
        tokens = torch.randint(0, 9, (3, nodes), generator=generator)
        tokens[1, nodes // 2 :] = ABSENT
        tokens[2, -1] = INVALID if seed % 3 == 0 else tokens[2, -1]
        logits = torch.randn(3, nodes + 1, 9, generator=generator) * 2
        logits[0, seed % (nodes + 1)] = torch.nan if seed % 4 == 3 else 0.0
        probs = torch.randn(3, nodes, 9, generator=generator).double().softmax(-1)
        samplings = Sampling(temperature=0.9, seed=seed), Sampling(), Sampling(temperature=1.0, frequency_penalty=0.5)
        draft = Draft(tokens=tokens, parents=torch.tensor(parents), probs=None if kind == "likeliest tokens" else probs)
        out = TargetOut(logits=logits, hidden={})
        found, plain = (
            verify(draft, out, sampler([[1, 2, 3]] * 3, samplings, draws="numbers")),
            plain_rejection.verify(draft, out, sampler([[1, 2, 3]] * 3, samplings, draws="numbers")),
        )
        assert found == plain
        accepted += sum(map(len, found.paths))
    assert accepted > 9, "a check in which nothing is accepted shows nothing"

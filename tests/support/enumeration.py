"""The joint distribution of texts under a verification rule, by enumeration.

Every way a round can go is one row of a batch: which tokens were drafted, and which nodes shall be
accepted. How likely a row is, is found from the rule itself: the uniform number below which it
accepts a node is searched by bisection, to the last bit. So nothing of the rule is written down twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.tree import ABSENT

VOCAB, LENGTH = 4, 4
"""Length of the texts that are compared, in tokens; drafts here are less deep."""
Verify = Callable[[Draft, TargetOut, "Scripted"], Verdict]

SHAPES = {
    "one": [-1],
    "chain": [-1, 0, 1],
    "siblings": [-1, -1, 0],
    "tree": [-1, -1, 0, 1],
    "three siblings": [-1, -1, -1],
    "nephews": [-1, -1, 0, 0],
    "depth first": [-1, 0, -1, 2],
    "ragged": [-1, 0, 1],
}
ABSENT_NODES = {"ragged": {1, 2}}
"""Nodes that a row does not have."""


class Scripted:
    """Stands in for `Sampler`: its random numbers are chosen by the test, and what is drawn from is remembered."""

    reads_text = False

    def __init__(self, p_BMV: Tensor, chance_BN: Tensor) -> None:
        self.p_BMV, self.chance_BN = p_BMV, chance_BN

    def probabilities(self, logits: Tensor, texts: Tensor | None) -> Tensor:
        return logits.exp()

    def acceptance_numbers(self, number: int) -> Tensor:
        return self.chance_BN

    def draw_next(self, probs_BV: Tensor) -> Tensor:
        self.left_BV = probs_BV
        return torch.zeros(len(probs_BV), dtype=torch.long)


def distribution(kind: int, text: tuple[int, ...]) -> list[float]:
    """Any conditional distribution of the next token; some tokens are impossible."""
    generator = torch.Generator().manual_seed(kind * 1000 + 2 + int("1" + "".join(str(token + 1) for token in text)))
    p = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 2
    if len(text) % 2:
        p[torch.randint(VOCAB, (1,), generator=generator)] = 0.0
    return (p / p.sum()).tolist()


def p_of(text: tuple[int, ...]) -> list[float]:
    return distribution(1, text)


def q_of(text: tuple[int, ...]) -> list[float]:
    return distribution(2, text)


@dataclass
class Drafted:
    """One possible draft: its tokens, the chance that it is made, and what each token was drawn from."""

    tokens: list[int]
    weight: float
    probs: list[list[float]] | None


def possible_drafts(shape: str, *, sampled: bool) -> list[Drafted]:
    """All drafts of a shape: siblings are drawn without replacement, or are the likeliest tokens."""
    parents, absent = SHAPES[shape], ABSENT_NODES.get(shape, set())
    drafts = [Drafted([], 1.0, [] if sampled else None)]
    for node, parent in enumerate(parents):
        longer = []
        for draft in drafts:
            before = tuple(draft.tokens[i] for i in path_to(parents, parent))
            taken = {draft.tokens[i] for i in range(node) if parents[i] == parent}
            q = [0.0 if token in taken else q for token, q in enumerate(q_of(before))]
            if node in absent:
                q, choices = [0.0] * VOCAB, [(ABSENT, 1.0)]
            elif sampled and sum(q) > 0:
                q = [value / sum(q) for value in q]
                choices = [(token, chance) for token, chance in enumerate(q) if chance > 0]
            else:
                free = [token for token in range(VOCAB) if token not in taken]
                choices = [(max(free, key=lambda token: q_of(before)[token]) if not sampled else ABSENT, 1.0)]
            for token, chance in choices:
                probs = None if draft.probs is None else [*draft.probs, q]
                longer.append(Drafted([*draft.tokens, token], draft.weight * chance, probs))
        drafts = longer
    return drafts


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node == ABSENT else [*path_to(parents, parents[node]), node]


@dataclass
class Ended:
    """One outcome of a round: its probability, the accepted tokens, and the distribution of the next token."""

    weight: float
    accepted: list[int]
    left: list[float]
    after: list[int]
    """Tokens that the rule adds after the next token, which only a wrong one does."""


def rounds(rule: Verify, shape: str, drafts: list[Drafted]) -> list[Ended]:
    """All ways a round can end."""
    parents, N = SHAPES[shape], len(SHAPES[shape])
    tokens = torch.tensor([draft.tokens for draft in drafts])
    probs = None if drafts[0].probs is None else torch.tensor([draft.probs for draft in drafts], dtype=torch.float64)
    texts = [[tuple(draft.tokens[i] for i in path_to(parents, node)) for node in range(-1, N)] for draft in drafts]
    nowhere = [1.0 / VOCAB] * VOCAB
    p = [[nowhere if ABSENT in text else p_of(text) for text in row] for row in texts]
    p_BMV = torch.tensor(p, dtype=torch.float64)
    which = torch.arange(len(drafts))  # the draft of each row
    weight = torch.tensor([draft.weight for draft in drafts], dtype=torch.float64)
    chance = torch.ones(len(drafts), N, dtype=torch.float64)

    def ended() -> tuple[Verdict, Scripted]:
        parents_BN = torch.tensor(parents).expand(len(which), N)
        draft = Draft(tokens=tokens[which], parents=parents_BN, probs=None if probs is None else probs[which])
        script = Scripted(p_BMV[which], chance)
        return rule(draft, TargetOut(logits=p_BMV[which].log(), hidden={}), script), script

    for node in range(N):
        low, high = torch.zeros_like(weight), torch.ones_like(weight)
        for _ in range(60):
            chance[:, node] = (low + high) / 2
            is_accepted = torch.tensor([node in path for path in ended()[0].paths])
            low, high = torch.where(is_accepted, chance[:, node], low), torch.where(is_accepted, high, chance[:, node])
        chance[:, node] = 0.0
        threshold = torch.where(torch.tensor([node in path for path in ended()[0].paths]), high, 0.0)
        # Each row goes both ways from here.
        which, weight = which.repeat(2), torch.cat([weight * threshold, weight * (1.0 - threshold)])
        chance = torch.cat([chance, chance.index_fill(1, torch.tensor([node]), 1.0)])
        which, weight, chance = which[weight > 0], weight[weight > 0], chance[weight > 0]

    verdict, script = ended()
    rows = zip(weight.tolist(), map(len, verdict.paths), verdict.tokens, script.left_BV.tolist(), strict=True)
    return [Ended(chance, row[:count], left, row[count + 1 :]) for chance, count, row, left in rows]


def joint_distribution(ended: list[Ended]) -> dict[tuple[int, ...], float]:
    """The joint distribution of `LENGTH` tokens: one round, then plain decoding."""
    joint: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0.0)
    for end in ended:
        for token in range(VOCAB):
            spread(joint, (*end.accepted, token, *end.after)[:LENGTH], end.weight * end.left[token])
    return joint


def mean_accepted(rule: Verify, shape: str) -> float:
    """The mean number of accepted tokens, where the draft is drawn."""
    return sum(end.weight * len(end.accepted) for end in rounds(rule, shape, possible_drafts(shape, sampled=True)))


def spread(joint: dict[tuple[int, ...], float], text: tuple[int, ...], weight: float) -> None:
    """Goes on with plain decoding."""
    if len(text) == LENGTH:
        joint[text] += weight
    elif weight > 0:
        for token, chance in enumerate(p_of(text)):
            spread(joint, (*text, token), weight * chance)


def plain_distribution() -> dict[tuple[int, ...], float]:
    joint = dict.fromkeys(itertools.product(range(VOCAB), repeat=LENGTH), 0.0)
    spread(joint, (), 1.0)
    return joint


def largest_error(rule: Verify, shape: str, *, sampled: bool) -> float:
    """The largest difference of a text's probability from that of plain decoding."""
    return error_of(joint_distribution(rounds(rule, shape, possible_drafts(shape, sampled=sampled))))


def error_of(joint: dict[tuple[int, ...], float]) -> float:
    expected = plain_distribution()
    return max(abs(joint[text] - expected[text]) for text in expected)

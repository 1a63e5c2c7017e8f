"""Block verification: the tokens of a path are judged together, so that more are accepted than one after the other.

For chains this is block verification (Sun et al. 2025, "Block Verification Accelerates Speculative Decoding", Alg. 2),
for trees traversal verification (Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding"). A node is
reached with a chance P: 1 at the root, min(1, P p(x) / q(x)) at a child x of a node with the chance P. If neither a
child nor a node below it is accepted, norm(max(P p - q, 0)) takes the place of p and S / (S + 1 - P) that of P, where S
is the sum of max(P p - q, 0); then the next sibling is tried. P after the last child is the chance that the accepted
path ends at the node itself.

A node is rejected after a look at the nodes below it. So the draws at different nodes must be independent, where the
rule `rejection` lets all nodes of a depth share them.

Shape letters: B rows of a batch, N nodes of a draft, M = N + 1 places, the root and then the nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.parents import path_to, texts_before
from paradraft.ragged import upload
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Draws
from paradraft.tree import ABSENT
from paradraft.verify import Rule
from paradraft.verify.rejection import p_after


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Decides the accepted tokens and the recovered or bonus token.

    Worked example (Sun et al. 2025, section 2): the target says 0 with probability 1/3 and the draft model with 2/3,
    else 1. Of two tokens 11/9 are accepted in the mean; the rule `rejection` accepts 10/9.

    >>> from paradraft.core import Drafting, Request
    >>> from paradraft.sampling_params import Sampling
    >>> logits = torch.tensor([1 / 3, 2 / 3]).log().expand(9000, 3, 2)
    >>> probs = torch.tensor([2 / 3, 1 / 3]).double().expand(9000, 2, 2)
    >>> tokens = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 0], [0, 1], [0, 1], [1, 0], [1, 0], [1, 1]]).repeat(1000, 1)
    >>> samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(9000)]
    >>> requests = [Request(tokens=[1], sampling=sampling) for sampling in samplings]
    >>> sampler = Sampler(requests, drafting=Drafting(draws="numbers"))
    >>> verdict = verify(Draft.chain(tokens, probs), TargetOut(logits=logits, hidden={}), sampler)
    >>> round(sum(map(len, verdict.paths)) / 9000, 1)
    1.2
    """
    (B, N), device = draft.tokens.shape, draft.tokens.device
    trees = _Trees(draft, out, sampler)
    turn_BM = upload([_turns(children) for children in trees.children], device)
    number_BM = pad(sampler.acceptance_numbers(N), (1, 0))
    reach_BM = pad(torch.zeros(B, N, dtype=torch.float64, device=device), (1, 0), value=1.0)
    end_B, rows_B = torch.zeros(B, dtype=torch.long, device=device), trees.rows_B
    for place in range(N + 1):
        chance_B, number_B, count = reach_BM[:, place], number_BM[:, place], trees.most_children([place] * B)
        if not bool((chance_B > (0 if count else number_B)).any()):
            continue
        if count:
            p_BV = trees.p_after(torch.full_like(end_B, place))
        for rank in range(count):
            child_B, has_B = trees.child([place] * B, rank)
            reach_B = trees.chance_of(child_B, p_BV, chance_B)
            reach_BM[rows_B, child_B + 1] = torch.where(has_B, reach_B, reach_BM[rows_B, child_B + 1])
            if rank + 1 < count:
                p_BV, chance_B = trees.after_rejection(p_BV, chance_B, child_B, has_B)
            elif bool((has_B & (number_B < chance_B) & (chance_B < 1)).any()):  # else P stays 1, or is too small
                total_B = trees.residual(p_BV, chance_B, child_B)[1]
                chance_B = torch.where(has_B, _chance_left(chance_B, total_B), chance_B)
        is_end_B = (number_B < chance_B) & (turn_BM[:, place] < turn_BM[rows_B, end_B])
        end_B = torch.where(is_end_B, place, end_B)

    ends = end_B.tolist()
    left_BV, chance_B = trees.p_after(end_B), reach_BM[rows_B, end_B]
    for rank in range(trees.most_children(ends)):
        left_BV, chance_B = trees.after_rejection(left_BV, chance_B, *trees.child(ends, rank))
    paths = [path_to(end - 1, parents) for end, parents in zip(ends, draft.lists[1], strict=True)]
    return Verdict.of(draft, paths, sampler.draw_next(left_BV).tolist())


class _Trees:
    """The trees of a draft, and the distributions at their places."""

    def __init__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> None:
        self._draft, self._out, self._sampler = draft, out, sampler
        self._texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
        self._token_BN = draft.tokens.clamp(min=0)
        self.rows_B = torch.arange(len(draft.tokens), device=draft.tokens.device)
        self.children = [_children(*row) for row in zip(*draft.lists, strict=True)]
        """Of each row and place."""

    def p_after(self, place_B: Tensor) -> Tensor:
        """The target's distributions `[B, V]` at these places."""
        return p_after(place_B - 1, self._out, self._texts, self._sampler)

    def most_children(self, places: Sequence[int]) -> int:
        """Of the place of each row."""
        return max(len(children[place]) for children, place in zip(self.children, places, strict=True))

    def child(self, places: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
        """The child `[B]` with this rank of each row's place, or 0; and which rows have it."""
        nodes = [children[place] for children, place in zip(self.children, places, strict=True)]
        child_B = upload([each[rank] if rank < len(each) else ABSENT for each in nodes], self.rows_B.device)
        return child_B.clamp(min=0), child_B != ABSENT

    def chance_of(self, child_B: Tensor, p_BV: Tensor, chance_B: Tensor) -> Tensor:
        """min(1, P p(x) / q(x)); NaN, which nothing is below, where p or q is."""
        token_B, probs = self._token_BN[self.rows_B, child_B], self._draft.probs
        mass_B = chance_B * p_BV[self.rows_B, token_B]
        q_B = torch.ones_like(mass_B) if probs is None else probs[self.rows_B, child_B, token_B]
        return torch.where(mass_B >= q_B, (mass_B > 0).double(), mass_B / q_B)

    def residual(self, p_BV: Tensor, chance_B: Tensor, child_B: Tensor) -> tuple[Tensor, Tensor]:
        """max(P p - q, 0), and its sum."""
        rest_BV = chance_B[:, None] * p_BV
        if self._draft.probs is None:
            rest_BV[self.rows_B, self._token_BN[self.rows_B, child_B]] = 0.0
        else:
            rest_BV.sub_(self._draft.probs[self.rows_B, child_B]).clamp_(min=0.0)
        return rest_BV, rest_BV.sum(1)

    def after_rejection(self, p_BV: Tensor, chance_B: Tensor, child_B: Tensor, has_B: Tensor) -> tuple[Tensor, Tensor]:
        """The residual distribution, and what takes the place of P, in rows that have the child."""
        rest_BV, total_B = self.residual(p_BV, chance_B, child_B)
        has_rest_B1 = (has_B & (total_B > 0))[:, None]
        left_B = torch.where(has_B, _chance_left(chance_B, total_B), chance_B)
        return torch.where(has_rest_B1, rest_BV / total_B[:, None], p_BV), left_B


def _chance_left(chance_B: Tensor, total_B: Tensor) -> Tensor:
    """S / (S + 1 - P). Where p is NaN, P stays: the text ends there; a residual of 0 has no chance, unless P is 1."""
    left_B = torch.where(total_B > 0, total_B / (total_B + 1 - chance_B), chance_B)
    return left_B.masked_fill((total_B == 0) & (chance_B < 1), 0.0)


def _children(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The children of each place, in the order of their indices.

    >>> _children([5, 6, 7, ABSENT], [-1, -1, 0, 2])
    [[0, 1], [2], [], [], []]
    """
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token != ABSENT:
            children[parent + 1].append(node)
    return children


def _turns(children: Sequence[Sequence[int]]) -> list[int]:
    """When the walk that ends the path at the first possible place comes to each: after all below it, and after its
    earlier siblings and all below these.

    >>> _turns([[0, 1], [2], [], []])
    [3, 1, 2, 0]
    """
    turns, stack = [ABSENT] * len(children), [0]
    left = len(children)
    while stack:  # backwards
        turns[place := stack.pop()] = left = left - 1
        stack.extend(node + 1 for node in children[place])
    return turns


@dataclass(frozen=True, kw_only=True)
class BlockRule(Rule):
    """The rule; it has no settings."""

    draws: ClassVar[Draws] = "numbers"

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """See `verify`."""
        return verify(draft, out, sampler)


RULE = BlockRule

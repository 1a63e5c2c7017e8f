"""Block verification: the tokens of a path are judged together, so that more are accepted than one after the other.

For chains this is block verification (Sun et al. 2025, "Block Verification Accelerates Speculative Decoding", Alg. 2),
for trees traversal verification (Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding"). A node is
reached with a chance P: 1 at the root, min(1, P p(x) / q(x)) at a child x of a node with the chance P. If neither a
child nor a node below it is accepted, norm(max(P p - q, 0)) takes the place of p and S / (S + 1 - P) that of P, where S
is the sum of max(P p - q, 0); then the next sibling is tried. P after the last child is the chance that the accepted
path ends at the node itself.

A node is rejected after a look at the nodes below it. So the draws at different nodes must be independent, where the
rule `rejection` lets all nodes of a depth share them.

Shape letters: B rows of a batch, N nodes of a draft, M = N + 1 places, the root and then the nodes, C children of a
place, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradraft.core import Draft, Draws, TargetOut, Verdict
from paradraft.parents import texts_before
from paradraft.ragged import upload
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT
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
    texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
    trees = [_children(*row) for row in zip(*draft.lists, strict=True)]
    widest = [max(len(tree[place]) for tree in trees) for place in range(N + 1)]
    turn_BM = upload([_turns(tree) for tree in trees], device)
    number_BM = pad(sampler.acceptance_numbers(N), (1, 0))
    rows_B, token_BN = torch.arange(B, device=device), draft.tokens.clamp(min=0)
    reach_BM = pad(torch.zeros(B, N, dtype=torch.float64, device=device), (1, 0), value=1.0)

    end_B, left_BV = torch.zeros_like(rows_B), None
    for place in range(N + 1):
        chance_B, number_B = reach_BM[:, place], number_BM[:, place]
        if not bool((chance_B > (0 if widest[place] else number_B)).any()):
            continue
        p_BV = p_after(rows_B.new_full((B,), place - 1), out, texts, sampler)
        for rank in range(widest[place]):
            child_B = upload([tree[place][rank] if rank < len(tree[place]) else ABSENT for tree in trees], device)
            has_B, child_B = child_B != ABSENT, child_B.clamp(min=0)
            q_BV = draft.probs if draft.probs is None else draft.probs[rows_B, child_B]
            token_B = token_BN[rows_B, child_B]
            mass_B = chance_B * p_BV[rows_B, token_B]
            q_B = torch.ones_like(mass_B) if q_BV is None else q_BV[rows_B, token_B]
            reach_B = torch.where(mass_B < q_B, mass_B / q_B, (mass_B > 0).double())
            reach_BM[rows_B, child_B + 1] = torch.where(has_B, reach_B, reach_BM[rows_B, child_B + 1])
            # P never rises here, so a place that cannot be the end needs no residual.
            if rank + 1 == widest[place] and not bool((has_B & (number_B < chance_B)).any()):
                break
            p_BV, chance_B = _after_rejection(p_BV, chance_B, token_B, q_BV, has_B)
        is_end_B = number_B < chance_B
        if left_BV is not None:
            is_end_B &= turn_BM[:, place] < turn_BM[rows_B, end_B]
        end_B = torch.where(is_end_B, place, end_B)
        left_BV = p_BV if left_BV is None else torch.where(is_end_B[:, None], p_BV, left_BV)
    assert left_BV is not None
    ends = zip(end_B.tolist(), draft.lists[1], strict=True)
    return Verdict.of(draft, [_path(end, parents) for end, parents in ends], sampler.draw_next(left_BV).tolist())


def _after_rejection(
    p_BV: Tensor, chance_B: Tensor, token_B: Tensor, q_BV: Tensor | None, has_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The residual distribution, and the chance that takes the place of P, in rows that have the child."""
    weighed_BV = chance_B[:, None] * p_BV
    rest_BV = weighed_BV.scatter(1, token_B[:, None], 0.0) if q_BV is None else (weighed_BV - q_BV).clamp(min=0.0)
    total_B = rest_BV.sum(1)
    # Where p is NaN, P stays: the text ends there. A residual of 0 has no chance, unless P p = q up to rounding.
    left_B = torch.where(total_B > 0, total_B / (total_B + 1 - chance_B), chance_B)
    left_B = left_B.masked_fill((total_B == 0) & (chance_B < 1), 0.0)
    has_rest_B1 = (has_B & (total_B > 0))[:, None]
    return torch.where(has_rest_B1, rest_BV / total_B[:, None], p_BV), torch.where(has_B, left_B, chance_B)


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


def _path(end: int, parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    node = end - 1
    while node != ABSENT:
        path.insert(0, node)
        node = parents[node]
    return path


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """The rule; it has no settings."""

    draws: ClassVar[Draws] = "numbers"
    is_of_vllm: ClassVar[bool] = False
    same_tokens: ClassVar[bool] = False
    warning: ClassVar[str | None] = None

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """See `verify`."""
        return verify(draft, out, sampler)


RULE = BlockRule

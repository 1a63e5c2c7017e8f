"""A drafter's candidates, and the draft made of them: a chain, a tree of fixed paths, or a tree grown to a budget.

Shape letters: B rows of a batch, R or K positions, C candidates, N nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import INVALID, Draft
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The tokens that a drafter thinks of for R positions in a row, the best first.

    Args:
        tokens: `[B, R, C]` token ids, all different at one position; `INVALID` where the logits have NaN.
        log_probs: `[B, R, C]` logarithm of the estimated probability that the target takes each;
            -inf where there are fewer than C, of which none is the first.
        probs: `[B, R, C, V]` the distribution each token was drawn from, given that the better ones
            of its position are not it; None if they were chosen deterministically.
        confidence: `[B, R]` the drafter's largest probability, a function of the distribution alone; None
            if the prompt does not want it.
    """

    tokens: Tensor
    log_probs: Tensor
    probs: Tensor | None
    confidence: Tensor | None


def _candidates(
    tokens_BRC: Tensor, log_probs_BRC: Tensor, probs_BRCV: Tensor | None = None, *, confidence: Tensor | None
) -> Candidates:
    """Candidates whose tokens are `INVALID` where the draft model's logits are not numbers."""
    tokens_BRC = tokens_BRC.masked_fill(log_probs_BRC.isnan(), INVALID)
    return Candidates(tokens=tokens_BRC, log_probs=log_probs_BRC, probs=probs_BRCV, confidence=confidence)


def joined(parts: list[Candidates]) -> Candidates:
    """Candidates of consecutive positions as one."""
    probs = [part.probs for part in parts if part.probs is not None]
    confidence = [part.confidence for part in parts if part.confidence is not None]
    return Candidates(
        tokens=torch.cat([part.tokens for part in parts], dim=1),
        log_probs=torch.cat([part.log_probs for part in parts], dim=1),
        probs=torch.cat(probs, dim=1) if probs else None,
        confidence=torch.cat(confidence, dim=1) if confidence else None,
    )


def candidates_needed(tree: Tree | None) -> int:
    """How many candidates per position a draft of this shape may use."""
    if tree is None:
        return 1
    if tree.paths is not None:
        return max(max(path) for path in tree.paths) + 1
    return min(tree.nodes, MOST_CANDIDATES)


def assemble(candidates: Candidates, tree: Tree | None, *, aside: float) -> Draft:
    """Builds the draft of a round.

    Args:
        candidates: of K positions.
        tree: the shape; None for the chain of the best.
        aside: what the estimate of a node is worth when its position's candidates were found behind
            other tokens than its ancestors, in [0, 1]; 0 draws no branches behind side branches.
    """
    if tree is None:
        probs = None if candidates.probs is None else candidates.probs[:, :, 0]
        return Draft.chain(candidates.tokens[:, :, 0], probs, candidates.confidence)
    B, K, C = candidates.tokens.shape
    if tree.paths is not None:
        shapes = [[path for path in tree.paths if len(path) <= K and max(path) < C]] * B
    else:
        shapes = [best_first(row, tree.nodes, aside=aside) for row in candidates.log_probs.tolist()]
    return _draft(candidates, shapes)


def best_first(log_probs_KC: list[list[float]], budget: int, *, aside: float) -> list[tuple[int, ...]]:
    """The paths of the most promising tree: best first by the estimated probability of the whole path.

    Worked example: two positions, the best candidates have probabilities 0.6 and 0.3, then 0.9 and
    0.05. Behind the second best first token the estimates count half.

    >>> rows = [[math.log(0.6), math.log(0.3)], [math.log(0.9), math.log(0.05)]]
    >>> best_first(rows, 4, aside=0.5)
    [(0,), (0, 0), (1,), (1, 0)]
    """
    if not log_probs_KC:
        return []
    chosen: list[tuple[int, ...]] = []
    penalty = math.log(aside) if aside else -math.inf

    def gain(path: tuple[int, ...], before: float) -> float:
        return before + log_probs_KC[len(path) - 1][path[-1]] + (penalty if any(path[:-1]) else 0.0)

    heap: list[tuple[float, tuple[int, ...], float]] = [(-gain((0,), 0.0), (0,), 0.0)]
    while heap and len(chosen) < budget:
        cost, path, before = heapq.heappop(heap)
        if cost == math.inf:
            break
        chosen.append(path)
        # Its next sibling, and its first child.
        if path[-1] + 1 < len(log_probs_KC[len(path) - 1]):
            sibling = (*path[:-1], path[-1] + 1)
            heapq.heappush(heap, (-gain(sibling, before), sibling, before))
        if len(path) < len(log_probs_KC):
            child = (*path, 0)
            heapq.heappush(heap, (-gain(child, -cost), child, -cost))
    return chosen


def _draft(candidates: Candidates, shapes: list[list[tuple[int, ...]]]) -> Draft:
    """The draft whose nodes have these paths, row by row."""
    N = max(map(len, shapes))
    depths, ranks, parents = [], [], []
    for paths in shapes:
        index = {path: node for node, path in enumerate(paths)}
        filling = [ABSENT] * (N - len(paths))
        depths.append([len(path) - 1 for path in paths] + filling)
        ranks.append([path[-1] for path in paths] + filling)
        parents.append([index.get(path[:-1], ABSENT) for path in paths] + filling)
    device = candidates.tokens.device
    depth_BN, rank_BN, parents_BN = (torch.tensor(x, device=device).view(-1, N) for x in (depths, ranks, parents))
    rows_B1 = torch.arange(len(shapes), device=device)[:, None]
    is_there = (depth_BN != ABSENT) & (candidates.log_probs[rows_B1, depth_BN, rank_BN] != -math.inf)
    tokens: Tensor = candidates.tokens[rows_B1, depth_BN, rank_BN].masked_fill(~is_there, ABSENT)
    return Draft(
        tokens=tokens,
        parents=parents_BN,
        probs=None if candidates.probs is None else candidates.probs[rows_B1, depth_BN, rank_BN],
        confidence=None if candidates.confidence is None else candidates.confidence[rows_B1, depth_BN],
    )

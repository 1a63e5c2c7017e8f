"""From a drafter's candidates to a draft: a chain, a tree of fixed paths, or a tree grown to a budget.

Shape letters: B rows of a batch, K positions, C candidates, N nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from paradraft.core import ABSENT, MOST_CANDIDATES, Draft, Tree
from paradraft.sampler import Candidates


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
        shapes = [grown(row, tree.nodes, aside=aside) for row in candidates.log_probs.tolist()]
    return _draft(candidates, shapes)


def grown(log_probs_KC: list[list[float]], budget: int, *, aside: float) -> list[tuple[int, ...]]:
    """The paths of the most promising tree: best first by the estimated probability of the whole path.

    Worked example: two positions, the best candidates have probabilities 0.6 and 0.3, then 0.9 and
    0.05. Behind the second best first token the estimates count half.

    >>> rows = [[math.log(0.6), math.log(0.3)], [math.log(0.9), math.log(0.05)]]
    >>> grown(rows, 4, aside=0.5)
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

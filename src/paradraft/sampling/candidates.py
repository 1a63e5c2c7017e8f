"""Candidate tokens, and the draft built from them: a chain, a tree of fixed paths, or a tree grown to a budget.

Shape letters: B rows of a batch, R or K positions, C candidates, N nodes, V vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paradraft.core import INVALID, Draft
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Top-C candidate tokens for R consecutive positions.

    Args:
        tokens: `[B, R, C]` token ids, the best first, all different at one position; `INVALID` where the logits have
            NaN; `ABSENT` at a position without any.
        log_probs: `[B, R, C]` logarithm of the estimated probability that the target takes each; -inf where there are
            fewer than C.
        probs: `[B, R, C, V]` the distribution each token was drawn from, with the better ones of its position excluded;
            None if they were chosen deterministically.
        confidence: `[B, R]` the drafter's largest probability at the temperature (1 in greedy rows), before filters; a
            function of the logits alone. None if not requested.
    """

    tokens: Tensor
    log_probs: Tensor
    probs: Tensor | None
    confidence: Tensor | None

    def without_closed(self, logits_BRV: Tensor) -> Candidates:
        """No candidates, where the drafter's logits are numbers but the settings forbid every token that it can draft.

        A grammar may do so with a reduced vocabulary: it allows other tokens to the target.
        """
        is_closed = self.tokens == INVALID
        if not bool(is_closed.any()):
            return self
        is_closed &= logits_BRV.amax(-1, keepdim=True).isfinite()
        log_probs = torch.where(is_closed, -torch.inf, self.log_probs)
        return replace(self, tokens=self.tokens.masked_fill(is_closed, ABSENT), log_probs=log_probs)


def _candidates(
    tokens_BRC: Tensor, log_probs_BRC: Tensor, probs_BRCV: Tensor | None = None, *, confidence: Tensor | None
) -> Candidates:
    """Builds `Candidates`, with `INVALID` where the draft model's logits are not numbers."""
    tokens_BRC = tokens_BRC.masked_fill(log_probs_BRC.isnan(), INVALID)
    return Candidates(tokens=tokens_BRC, log_probs=log_probs_BRC, probs=probs_BRCV, confidence=confidence)


def joined(parts: list[Candidates]) -> Candidates:
    """Concatenates candidates of consecutive positions."""
    probs = [part.probs for part in parts if part.probs is not None]
    confidence = [part.confidence for part in parts if part.confidence is not None]
    return Candidates(
        tokens=torch.cat([part.tokens for part in parts], dim=1),
        log_probs=torch.cat([part.log_probs for part in parts], dim=1),
        probs=torch.cat(probs, dim=1) if probs else None,
        confidence=torch.cat(confidence, dim=1) if confidence else None,
    )


def candidates_needed(tree: Tree | None) -> int:
    """Most candidates per position that a draft of this shape uses."""
    if tree is None:
        return 1
    if tree.paths is not None:
        return max(max(path) for path in tree.paths) + 1
    return min(tree.nodes, MOST_CANDIDATES)


FIRST_POSITIONS = 8
"""Positions whose candidates are computed first: trees seldom reach deeper, and each position costs time."""
Grow = Callable[..., Tensor | None]
"""A faster version of `grow`; returns None for inputs that it does not support."""


def assemble(candidates: Candidates, tree: Tree | None, *, aside: float, faster: Grow | None = None) -> Draft:
    """Builds the draft of a round.

    Args:
        tree: the shape; None for the chain of the best.
        aside: factor in [0, 1] on the probability of a node below a side branch, where the candidates were computed for
            other ancestors; 0 draws no nodes below side branches.
        faster: replaces `grow`.
    """
    if tree is None:
        probs = None if candidates.probs is None else candidates.probs[:, :, 0]
        return Draft.chain(candidates.tokens[:, :, 0], probs, candidates.confidence)
    B, K, C = candidates.tokens.shape
    if tree.paths is not None:
        paths = [path for path in tree.paths if len(path) <= K and max(path) < C]
        return _draft(candidates, _flattened([paths]).expand(-1, B, -1))
    return _draft(candidates, _grown(candidates, tree.nodes, aside, faster))


def assemble_from(
    candidates_at: Callable[[int, int, Tensor | None], Candidates],
    K: int,
    tree: Tree | None,
    *,
    aside: float,
    faster: Grow | None = None,
) -> Draft:
    """`assemble` with candidates that are computed only as far as the tree needs them.

    A tree without a node at its last position would be the same with more positions.
    """
    if tree is None or tree.budget is None:
        return assemble(candidates_at(0, K, None), tree, aside=aside)
    known = min(FIRST_POSITIONS, K)
    candidates = candidates_at(0, known, None)
    while True:
        nodes_3BN = _grown(candidates, tree.budget, aside, faster)
        if known == K or not bool((nodes_3BN[0] == known - 1).any()):
            return _draft(candidates, nodes_3BN)
        more = min(2 * known, K)
        candidates = joined([candidates, candidates_at(known, more, candidates.tokens[:, :, 0])])
        known = more


def _grown(candidates: Candidates, budget: int, aside: float, faster: Grow | None) -> Tensor:
    nodes_3BN = None if faster is None else faster(candidates.log_probs, budget, aside=aside)
    return grow(candidates.log_probs, budget, aside=aside) if nodes_3BN is None else nodes_3BN


def grow(log_probs_BKC: Tensor, budget: int, *, aside: float) -> Tensor:
    """The nodes of each row's most probable tree; see `best_first`.

    Returns:
        `[3, B, N]` on the CPU: depth, rank and parent of each node, `ABSENT` after a row's last one.
    """
    return _flattened([best_first(row, budget, aside=aside) for row in log_probs_BKC.tolist()])


def best_first(log_probs_KC: list[list[float]], budget: int, *, aside: float) -> list[tuple[int, ...]]:
    """The paths of the most probable tree: best-first search by the estimated probability of the whole path.

    Worked example: two positions, the best candidates have probabilities 0.6 and 0.3, then 0.9 and 0.05. After the
    second best first token the estimates are halved.

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


def _flattened(shapes: list[list[tuple[int, ...]]]) -> Tensor:
    """Converts each row's paths to depths, ranks and parents, as returned by `grow`."""
    N = max(map(len, shapes))
    nodes: list[list[list[int]]] = [[], [], []]
    for paths in shapes:
        index = {path: node for node, path in enumerate(paths)}
        padding = [ABSENT] * (N - len(paths))
        nodes[0].append([len(path) - 1 for path in paths] + padding)
        nodes[1].append([path[-1] for path in paths] + padding)
        nodes[2].append([index.get(path[:-1], ABSENT) for path in paths] + padding)
    return torch.tensor(nodes, dtype=torch.long, device="cpu").view(3, len(shapes), N)


def _draft(candidates: Candidates, nodes_3BN: Tensor) -> Draft:
    tokens_BKC, device = candidates.tokens, candidates.tokens.device
    if device.type == "cuda":  # without synchronization
        nodes_3BN = nodes_3BN.contiguous().pin_memory().to(device, non_blocking=True)
    depth_BN, rank_BN, parents_BN = nodes_3BN.contiguous().unbind()
    # For absent nodes any index will do.
    which_BN = (depth_BN * tokens_BKC.shape[2] + rank_BN).clamp(min=0)
    is_present_BN = (depth_BN != ABSENT) & (candidates.log_probs.flatten(1).gather(1, which_BN) != -math.inf)
    probs = confidence = None
    if candidates.probs is not None:
        rows_B1 = torch.arange(len(which_BN), device=device)[:, None]
        probs = candidates.probs.flatten(1, 2)[rows_B1, which_BN]
    if candidates.confidence is not None:
        confidence = candidates.confidence.gather(1, depth_BN.remainder(tokens_BKC.shape[1]))
    tokens_BN = tokens_BKC.flatten(1).gather(1, which_BN).masked_fill(~is_present_BN, ABSENT)
    return Draft(tokens=tokens_BN, parents=parents_BN, probs=probs, confidence=confidence)

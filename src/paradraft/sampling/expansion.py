"""Autoregressive tree drafting: each depth is drafted from the tokens above it (EAGLE-2).

For drafters that can predict the tokens after each of several nodes: EAGLE, and masks with a previous-token head.

Shape letters: B rows of a batch, V vocabulary, W nodes that are expanded at a depth, D tokens of a path, C candidates
after a node, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.sampling.candidates import candidates_needed
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, MOST_CANDIDATES, Tree

EXPANDED = 10
"""Nodes expanded at each depth, and candidates after each, as in EAGLE-2's code."""
Expand = Callable[[int, Tensor, Tensor], Tensor]
"""Computes the logits `[B, W, V]` after W nodes, from the depth of their children, the nodes' tokens `[B, W]`, and the
indices `[B, W]` of their parents among the previously expanded nodes."""


def expanded(
    sampler: Sampler, tree: Tree | None, first_B1V: Tensor, expand: Expand, *, k: int, widest: int = MOST_CANDIDATES
) -> Draft:
    """Drafts depth by depth.

    Args:
        first_B1V: logits after the last committed token.
        k: most tokens of a path.
        widest: most nodes to expand at a depth of a tree with a budget.
    """
    if tree is None:
        return _chain(sampler, first_B1V, expand, k)
    if tree.paths is not None:
        return _along(tree.paths, sampler, tree, first_B1V, expand, k)
    assert tree.budget is not None
    return _likeliest(sampler, tree.budget, first_B1V, expand, k, widest)


def _chain(sampler: Sampler, logits_B1V: Tensor, expand: Expand, k: int) -> Draft:
    none_B0 = torch.empty(len(logits_B1V), 0, dtype=torch.long, device=logits_B1V.device)
    tokens_BD, probs, confidence, spine_B1 = none_B0, [], [], torch.zeros_like(logits_B1V[:, :, 0], dtype=torch.long)
    for depth in range(k):
        if depth:
            logits_B1V = expand(depth, tokens_BD[:, -1:], spine_B1)
        candidates = sampler.candidates_after(logits_B1V, depth, 1, tokens_BD[:, None])
        tokens_BD = torch.cat([tokens_BD, candidates.tokens[:, :, 0]], dim=1)
        probs.append(candidates.probs)
        confidence.append(candidates.confidence)
    return Draft.chain(tokens_BD, _whole(probs, 0), _whole(confidence))


def _whole(parts: list[Tensor | None], rank: int | None = None) -> Tensor | None:
    """Concatenates the parts of all depths; only candidates of this rank, unless None."""
    present = [part if rank is None else part[:, :, rank] for part in parts if part is not None]
    return torch.cat(present, dim=1) if present else None


def _along(
    paths: tuple[tuple[int, ...], ...], sampler: Sampler, tree: Tree, logits_BWV: Tensor, expand: Expand, k: int
) -> Draft:
    """A tree of fixed paths: the children of each node are the candidates after it, by rank."""
    B, device = len(logits_BWV), logits_BWV.device
    count = min(candidates_needed(tree), logits_BWV.shape[2])
    paths = tuple(path for path in paths if len(path) <= k and max(path) < count)
    node_of = {path: node for node, path in enumerate(paths)}
    tokens, probs, confidence = [], [], []
    texts_BWD = torch.empty(B, 1, 0, dtype=torch.long, device=device)
    before: list[tuple[int, ...]] = [()]
    for depth in range(max(map(len, paths), default=0)):
        nodes = [path for path in paths if len(path) == depth + 1]
        candidates = sampler.candidates_after(logits_BWV, depth, count, texts_BWD)
        slots = torch.tensor([before.index(path[:-1]) for path in nodes], device=device)
        ranks = torch.tensor([path[-1] for path in nodes], device=device)
        tokens.append(
            candidates.tokens[:, slots, ranks].masked_fill(candidates.log_probs[:, slots, ranks] == -torch.inf, ABSENT)
        )
        probs.append(None if candidates.probs is None else candidates.probs[:, slots, ranks])
        confidence.append(None if candidates.confidence is None else candidates.confidence[:, slots])
        parents = {path[:-1] for path in paths if len(path) == depth + 2}
        kept = [index for index, path in enumerate(nodes) if path in parents]
        if kept:
            before = [nodes[index] for index in kept]
            texts_BWD = torch.cat([texts_BWD[:, slots[kept]], tokens[-1][:, kept, None]], dim=2)
            logits_BWV = expand(depth + 1, tokens[-1][:, kept], slots[kept].expand(B, -1))
    parents_N = torch.tensor([node_of.get(path[:-1], ABSENT) for path in paths], device=device)
    tokens_BN = torch.cat(tokens, dim=1)
    return Draft(
        tokens=tokens_BN, parents=parents_N.expand_as(tokens_BN), probs=_whole(probs), confidence=_whole(confidence)
    )


def _likeliest(sampler: Sampler, budget: int, logits_BWV: Tensor, expand: Expand, k: int, widest: int) -> Draft:
    """EAGLE-2 (Li et al. 2024b, section 4): at each depth the likeliest nodes are expanded, and of all nodes the
    likeliest are drafted."""
    B, device = len(logits_BWV), logits_BWV.device
    count, widest = min(budget, EXPANDED, MOST_CANDIDATES), min(budget, EXPANDED, widest)
    texts_BWD = torch.empty(B, 1, 0, dtype=torch.long, device=device)
    candidates = sampler.candidates_after(logits_BWV, 0, count, texts_BWD)
    tokens_BN, values_BN = candidates.tokens.flatten(1), candidates.log_probs.flatten(1)
    parents_BN = torch.full_like(tokens_BN, ABSENT)
    confidence = [candidates.confidence]
    level, after_BN = 0, torch.zeros_like(tokens_BN)  # each node's parent among the expanded nodes
    for depth in range(1, k):
        values_BW, chosen_BW = values_BN[:, level:].topk(min(widest, values_BN.shape[1] - level), dim=1)
        chosen_BW, W = chosen_BW + level, chosen_BW.shape[1]
        new_BW, slot_BW = tokens_BN.gather(1, chosen_BW), after_BN.gather(1, chosen_BW)
        before_BWD = texts_BWD.gather(1, slot_BW[:, :, None].expand(-1, -1, texts_BWD.shape[2]))
        texts_BWD = torch.cat([before_BWD, new_BW[:, :, None]], dim=2)
        candidates = sampler.candidates_after(expand(depth, new_BW, slot_BW), depth, count, texts_BWD)
        level, C = tokens_BN.shape[1], candidates.tokens.shape[2]
        tokens_BN = torch.cat([tokens_BN, candidates.tokens.flatten(1)], dim=1)
        values_BN = torch.cat([values_BN, (values_BW[:, :, None] + candidates.log_probs).flatten(1)], dim=1)
        parents_BN = torch.cat([parents_BN, chosen_BW.repeat_interleave(C, dim=1)], dim=1)
        after_BN = torch.arange(W, device=device).repeat_interleave(C).expand(B, -1)
        after_BN = torch.nn.functional.pad(after_BN, (level, 0))
        confidence.append(candidates.confidence)
    sure = _whole(confidence)
    sure = None if sure is None else sure.repeat_interleave(candidates.tokens.shape[2], dim=1)
    return likeliest_nodes(tokens_BN, parents_BN, values_BN, budget, confidence_BN=sure)


def likeliest_nodes(
    tokens_BN: Tensor, parents_BN: Tensor, values_BN: Tensor, budget: int, *, confidence_BN: Tensor | None = None
) -> Draft:
    """The draft of the `budget` likeliest nodes.

    Args:
        parents_BN: earlier nodes, or -1.
        values_BN: log of the estimated probability of the path to each node; never above its parent's, so that the
            ancestors of a selected node are selected too. -inf for absent nodes.

    >>> tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 1]])
    >>> draft = likeliest_nodes(tokens, parents, torch.tensor([[-0.1, -2.0, -0.3, -2.5]]), 3)
    >>> draft.tokens.tolist(), draft.parents.tolist()
    ([[5, 6, 7]], [[-1, -1, 0]])
    """
    best_BN = values_BN.sort(dim=1, descending=True, stable=True).indices[:, :budget].sort(dim=1).values
    index_BN = torch.full_like(tokens_BN, ABSENT)
    index_BN = index_BN.scatter(1, best_BN, torch.arange(best_BN.shape[1], device=best_BN.device).expand_as(best_BN))
    kept_BN = parents_BN.gather(1, best_BN)
    parents = torch.where(kept_BN == ABSENT, ABSENT, index_BN.gather(1, kept_BN.clamp(min=0)))
    is_none_BN = values_BN.gather(1, best_BN) == -torch.inf
    return Draft(
        tokens=tokens_BN.gather(1, best_BN).masked_fill(is_none_BN, ABSENT),
        parents=parents,
        confidence=None if confidence_BN is None else confidence_BN.gather(1, best_BN),
    )

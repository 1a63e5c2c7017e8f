"""Drafts in which every token is thought of after the very tokens before it, depth by depth.

A drafter that can say what follows each of several nodes builds its trees so: EAGLE's layer, and masks that are told
the tokens before them.

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
"""Nodes that are expanded at each depth, and tokens that are thought of after each, as in EAGLE-2's code."""
Expand = Callable[[int, Tensor, Tensor], Tensor]
"""What gives the logits `[B, W, V]` after some nodes, from the depth after them, the first being 0, their tokens
`[B, W]`, and which of the nodes expanded before each follows, `[B, W]`."""


def expanded(
    sampler: Sampler, tree: Tree | None, first_B1V: Tensor, expand: Expand, *, k: int, widest: int = MOST_CANDIDATES
) -> Draft:
    """The draft of a round.

    Args:
        sampler: chooses the tokens.
        tree: the shape; None for chains.
        first_B1V: logits after the last committed token.
        expand: asked depth by depth.
        k: most tokens of a path.
        widest: expand no more nodes than this at a depth of a tree that grows.
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
        found = sampler.candidates_after(logits_B1V, depth, 1, tokens_BD[:, None])
        tokens_BD = torch.cat([tokens_BD, found.tokens[:, :, 0]], dim=1)
        probs.append(found.probs)
        confidence.append(found.confidence)
    return Draft.chain(tokens_BD, _whole(probs, 0), _whole(confidence))


def _whole(parts: list[Tensor | None], rank: int | None = None) -> Tensor | None:
    """What was found at each depth as one; of candidates with this rank, if there is a choice."""
    there = [part if rank is None else part[:, :, rank] for part in parts if part is not None]
    return torch.cat(there, dim=1) if there else None


def _along(
    paths: tuple[tuple[int, ...], ...], sampler: Sampler, tree: Tree, logits_BWV: Tensor, expand: Expand, k: int
) -> Draft:
    """A tree of fixed paths: the children of each node are the candidates after it, by rank."""
    B, device = len(logits_BWV), logits_BWV.device
    number = min(candidates_needed(tree), logits_BWV.shape[2])
    paths = tuple(path for path in paths if len(path) <= k and max(path) < number)
    places = {path: place for place, path in enumerate(paths)}
    tokens, probs, confidence = [], [], []
    texts_BWD = torch.empty(B, 1, 0, dtype=torch.long, device=device)
    before: list[tuple[int, ...]] = [()]
    for depth in range(max(map(len, paths), default=0)):
        nodes = [path for path in paths if len(path) == depth + 1]
        found = sampler.candidates_after(logits_BWV, depth, number, texts_BWD)
        slots = torch.tensor([before.index(path[:-1]) for path in nodes], device=device)
        ranks = torch.tensor([path[-1] for path in nodes], device=device)
        tokens.append(found.tokens[:, slots, ranks].masked_fill(found.log_probs[:, slots, ranks] == -torch.inf, ABSENT))
        probs.append(None if found.probs is None else found.probs[:, slots, ranks])
        confidence.append(None if found.confidence is None else found.confidence[:, slots])
        parents = {path[:-1] for path in paths if len(path) == depth + 2}
        kept = [at for at, path in enumerate(nodes) if path in parents]
        if kept:
            before = [nodes[at] for at in kept]
            texts_BWD = torch.cat([texts_BWD[:, slots[kept]], tokens[-1][:, kept, None]], dim=2)
            logits_BWV = expand(depth + 1, tokens[-1][:, kept], slots[kept].expand(B, -1))
    parents_N = torch.tensor([places.get(path[:-1], ABSENT) for path in paths], device=device)
    tokens_BN = torch.cat(tokens, dim=1)
    return Draft(
        tokens=tokens_BN, parents=parents_N.expand_as(tokens_BN), probs=_whole(probs), confidence=_whole(confidence)
    )


def _likeliest(sampler: Sampler, budget: int, logits_BWV: Tensor, expand: Expand, k: int, widest: int) -> Draft:
    """A tree that grows as in EAGLE-2 (Li et al. 2024b, section 4): from depth to depth the likeliest nodes are
    expanded, and of all nodes the likeliest are drafted."""
    B, device = len(logits_BWV), logits_BWV.device
    number, widest = min(budget, EXPANDED, MOST_CANDIDATES), min(budget, EXPANDED, widest)
    texts_BWD = torch.empty(B, 1, 0, dtype=torch.long, device=device)
    found = sampler.candidates_after(logits_BWV, 0, number, texts_BWD)
    tokens_BN, values_BN = found.tokens.flatten(1), found.log_probs.flatten(1)
    parents_BN = torch.full_like(tokens_BN, ABSENT)
    confidence = [found.confidence]
    level, after_BN = 0, torch.zeros_like(tokens_BN)  # which expanded node of the depth before each node follows
    for depth in range(1, k):
        values_BW, chosen_BW = values_BN[:, level:].topk(min(widest, values_BN.shape[1] - level), dim=1)
        chosen_BW, W = chosen_BW + level, chosen_BW.shape[1]
        new_BW, slot_BW = tokens_BN.gather(1, chosen_BW), after_BN.gather(1, chosen_BW)
        before_BWD = texts_BWD.gather(1, slot_BW[:, :, None].expand(-1, -1, texts_BWD.shape[2]))
        texts_BWD = torch.cat([before_BWD, new_BW[:, :, None]], dim=2)
        found = sampler.candidates_after(expand(depth, new_BW, slot_BW), depth, number, texts_BWD)
        level, C = tokens_BN.shape[1], found.tokens.shape[2]
        tokens_BN = torch.cat([tokens_BN, found.tokens.flatten(1)], dim=1)
        values_BN = torch.cat([values_BN, (values_BW[:, :, None] + found.log_probs).flatten(1)], dim=1)
        parents_BN = torch.cat([parents_BN, chosen_BW.repeat_interleave(C, dim=1)], dim=1)
        after_BN = torch.arange(W, device=device).repeat_interleave(C).expand(B, -1)
        after_BN = torch.nn.functional.pad(after_BN, (level, 0))
        confidence.append(found.confidence)
    sure = _whole(confidence)
    sure = None if sure is None else sure.repeat_interleave(found.tokens.shape[2], dim=1)
    return likeliest_nodes(tokens_BN, parents_BN, values_BN, budget, confidence_BN=sure)


def likeliest_nodes(
    tokens_BN: Tensor, parents_BN: Tensor, values_BN: Tensor, budget: int, *, confidence_BN: Tensor | None = None
) -> Draft:
    """The draft of the `budget` likeliest of some nodes.

    Args:
        tokens_BN: of the nodes.
        parents_BN: of each node an earlier one, or -1.
        values_BN: the logarithm of the estimated probability of the path to each; none is above its parent's, so a
            node's parents are among the likeliest too. -inf for nodes that are none.
        budget: how many.
        confidence_BN: see `Draft`.

    >>> tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 1]])
    >>> draft = likeliest_nodes(tokens, parents, torch.tensor([[-0.1, -2.0, -0.3, -2.5]]), 3)
    >>> draft.tokens.tolist(), draft.parents.tolist()
    ([[5, 6, 7]], [[-1, -1, 0]])
    """
    best_BN = values_BN.sort(dim=1, descending=True, stable=True).indices[:, :budget].sort(dim=1).values
    place_BN = torch.full_like(tokens_BN, ABSENT)
    place_BN = place_BN.scatter(1, best_BN, torch.arange(best_BN.shape[1], device=best_BN.device).expand_as(best_BN))
    kept_BN = parents_BN.gather(1, best_BN)
    parents = torch.where(kept_BN == ABSENT, ABSENT, place_BN.gather(1, kept_BN.clamp(min=0)))
    is_none_BN = values_BN.gather(1, best_BN) == -torch.inf
    return Draft(
        tokens=tokens_BN.gather(1, best_BN).masked_fill(is_none_BN, ABSENT),
        parents=parents,
        confidence=None if confidence_BN is None else confidence_BN.gather(1, best_BN),
    )

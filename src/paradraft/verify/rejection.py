"""Verification by rejection: speculative sampling, for chains and trees.

A drafted token x is kept with probability min(1, p(x) / q(x)); after a rejection p becomes
norm(max(p - q, 0)), against which the next sibling is tried, and the token that ends the round is
drawn from what p is then (Leviathan et al. 2023, Alg. 1; Chen et al. 2023, Alg. 2; for siblings
ParallelSpec, Xiao et al. 2024, Alg. 1). q is the distribution that the token was really drawn from,
so a token that was chosen deterministically has q(x) = 1. The emitted tokens have exactly the
target's distribution, but which ones they are depends on the draft.

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.ragged import upload
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, texts_before


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Decides which drafted tokens are kept and which token follows them.

    Nodes are tried in the order of their indices, each only where its parent has just been
    accepted. So parents come before children, and siblings are tried one after the other.

    Args:
        draft: the proposed tree.
        out: the target's pass over it.
        sampler: how the target chooses in each row.

    Worked example: p is 0.5 for the drafted token and q is 1, because it was chosen
    deterministically. It is kept in half of all rounds; else p without it is drawn from.

    >>> from paradraft.core import Prompt
    >>> from paradraft.sampling_params import Sampling
    >>> logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 2, 3)
    >>> draft = Draft.chain(torch.zeros(1000, 1, dtype=torch.long))
    >>> samplings = tuple(Sampling(temperature=1.0, seed=seed) for seed in range(1000))
    >>> sampler = Sampler(Prompt(tokens=torch.ones(1000, 1, dtype=torch.long), sampling=samplings, rule="rejection"))
    >>> verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler)
    >>> [(verdict.tokens[:, 0] == token).sum().item() for token in range(3)]
    [490, 319, 191]
    """
    (B, N), device = draft.tokens.shape, draft.tokens.device
    texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
    every_B = torch.arange(B, device=device)

    def p_after(nodes: list[int]) -> Tensor:
        """The target's distributions `[B, V]` after one node of each row, -1 for the root."""
        at_B = upload(nodes, device) + 1
        paths = None if texts is None else texts[every_B, at_B][:, None]
        return sampler.probabilities(out.logits[every_B, at_B][:, None], paths)[:, 0]

    chances = sampler.acceptance_numbers(N).tolist()
    rows = list(map(_Row, draft.tokens.tolist(), draft.parents.tolist()))
    left_BV = p_after([-1] * B)
    while True:
        left_BV = _try_siblings(rows, chances, left_BV, draft.probs)
        if not (goes_on := [row.has_moved for row in rows]).count(True):
            break
        next_BV = p_after([row.here for row in rows])
        left_BV = next_BV if all(goes_on) else torch.where(upload(goes_on, device)[:, None] > 0, next_BV, left_BV)
    path = upload([row.path + [ABSENT] * (N - len(row.path)) for row in rows], device).view(B, N)
    return Verdict.of(draft, path, sampler.draw_next(left_BV))


class _Row:
    """Where one row's walk down its tree stands.

    Args:
        tokens: of the nodes, `ABSENT` where there is none.
        parents: of the nodes, each before its children; -1 is the root.
    """

    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self._tokens, self._parents = tokens, parents
        self._next = 0
        self.path: list[int] = []
        self.has_moved = False
        """Whether a child of the last node has just been accepted."""

    @property
    def here(self) -> int:
        """The last accepted node; -1 for the root."""
        return self.path[-1] if self.path else -1

    def next_child(self) -> int | None:
        """The next child of `here` that has not been tried; its siblings before it and their children never are again."""
        here = self.here
        for node in range(self._next, len(self._tokens)):
            if self._parents[node] == here and self._tokens[node] != ABSENT:
                self._next = node + 1
                return node
        self._next = len(self._tokens)
        return None

    def token(self, node: int) -> int:
        """The token of a node, 0 where it is `INVALID`."""
        return max(self._tokens[node], 0)


def _try_siblings(rows: list[_Row], chances: list[list[float]], left_BV: Tensor, probs: Tensor | None) -> Tensor:
    """Tries the children of each row's last node until one is accepted, which is added to its path, or none is left.

    Args:
        rows: changed in place.
        chances: of each node, the number that decides about it.
        left_BV: what the token after the last node is distributed like.
        probs: of the draft.

    Returns:
        `[B, V]` the same after the rejections.
    """
    device = left_BV.device
    open_rows = dict(enumerate(rows))
    for row in rows:
        row.has_moved = False
    while tried := {index: node for index, row in open_rows.items() if (node := row.next_child()) is not None}:
        indices, nodes = list(tried), list(tried.values())
        where = upload([indices, nodes, [rows[index].token(node) for index, node in tried.items()]], device)
        rows_b, nodes_b, tokens_b = where.unbind()
        p_b = left_BV[rows_b, tokens_b].tolist()
        q_b = [1.0] * len(nodes) if probs is None else probs[rows_b, nodes_b, tokens_b].double().tolist()
        rejected = []
        for place, (index, node) in enumerate(tried.items()):
            if chances[index][node] * q_b[place] < p_b[place]:
                rows[index].path.append(node)
                rows[index].has_moved = True
            else:
                rejected.append(place)
        open_rows = {indices[place]: rows[indices[place]] for place in rejected}
        if not rejected:
            break
        if len(rejected) < len(nodes):
            rows_b, nodes_b, tokens_b = where[:, upload(rejected, device)].unbind()
        before_bV = left_BV[rows_b]
        if probs is None:
            rest_bV = before_bV.scatter(1, tokens_b[:, None], 0.0)
        else:
            rest_bV = (before_bV - probs[rows_b, nodes_b].to(before_bV.dtype)).clamp(min=0.0)
        total_b1 = rest_bV.sum(1, keepdim=True)
        # Nothing is left only if p = q up to rounding; then a rejection has no probability either.
        left_BV = left_BV.index_put((rows_b,), torch.where(total_b1 > 0, rest_bV / total_b1, before_bV))
    return left_BV

"""Builds a draft from one pass that predicts all depths.

Shape letters: B rows of a batch, K depths, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.models.forward.cpu.tree import grow
from paradraft.sampling.candidates import Candidates, assemble_from, candidates_needed
from paradraft.sampling.expansion import expanded
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree

ASIDE = 0.5
"""Factor on the confidence of tokens below a side branch: predictions assume the likeliest tokens before them, and a
side branch has others."""


def draft_of_pass(
    sampler: Sampler,
    tree: Tree | None,
    logits_BKV: Tensor,
    head: PathHead | None = None,
    states_BKD: Tensor | None = None,
    anchors: Sequence[int] = (),
) -> Draft:
    """Draws the tokens of all depths from logits, or with a head as `PathHead.draft`, which needs their states too.

    Rules of the kind "numbers" need separate random numbers for each node of a tree; only `expanded` draws so.
    """
    if head is not None and states_BKD is not None:
        return head.draft(sampler, tree, logits_BKV, states_BKD, anchors)
    K, count = logits_BKV.shape[1], candidates_needed(tree)
    if sampler.draws == "numbers" and tree is not None and tree.paths is not None:

        def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
            return logits_BKV[:, depth, None].expand(-1, new_BW.shape[1], -1)

        return expanded(sampler, tree, logits_BKV[:, :1], expand, k=K)

    def candidates_at(first: int, last: int, before_BD: Tensor | None) -> Candidates:
        return sampler.candidates(logits_BKV[:, first:last], first, count, before_BD)

    return assemble_from(candidates_at, K, tree, aside=ASIDE, faster=grow)

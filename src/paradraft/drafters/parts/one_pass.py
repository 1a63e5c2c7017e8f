"""The draft of a drafter that says in one pass what comes at all places.

Shape letters: B rows of a batch, K places, V vocabulary, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters.parts.previous_token import Correction
from paradraft.models.forward.cpu.tree import grow
from paradraft.sampling.candidates import Candidates, assemble_from, candidates_needed
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree

ASIDE = 0.5
"""What an estimate is worth after a side branch: what is said of a place follows the likeliest tokens before it, and
those of a side branch are others."""


def draft_of_pass(
    sampler: Sampler,
    tree: Tree | None,
    logits_BKV: Tensor,
    correction: Correction | None = None,
    states_BKD: Tensor | None = None,
) -> Draft:
    """Draws the tokens of all places.

    Args:
        sampler: chooses them.
        tree: the shape of the draft; None for chains.
        logits_BKV: what the pass said of each place.
        correction: tells each place the tokens before it; None if nothing does.
        states_BKD: from which the pass said it, for the correction.
    """
    if correction is not None and states_BKD is not None:
        return correction.draft(sampler, tree, logits_BKV, states_BKD)
    number = candidates_needed(tree)

    def candidates_at(first: int, last: int, before_BD: Tensor | None) -> Candidates:
        return sampler.candidates(logits_BKV[:, first:last], first, number, before_BD)

    return assemble_from(candidates_at, logits_BKV.shape[1], tree, aside=ASIDE, faster=grow)

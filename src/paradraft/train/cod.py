"""COD, the conditional drop of training rows (An et al. 2025, section 3.2.2, Alg. 1).

All rows of K depths would be K times the tokens. Later depths matter less, so depth i keeps only
N * max(r^i, r_min) rows (Eq. 9-11; the paper counts depths from 1, we from 0). A row is kept only
if the row before it in its chain, (position - 1, depth - 1), was kept: then every kept row finds
all its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.train.rows import Rows


def conditional_drop(
    n: int, *, k: int, r: float, r_min: float, generator: torch.Generator, may_draft: Tensor | None = None
) -> Rows:
    """Draws the rows of a sample.

    Args:
        n: positions that have a next token to predict, at least 1.
        k: depths, 0 to k - 1; as many tokens as a draft pass predicts.
        r: share of rows that each depth keeps of the one before, in (0, 1].
        r_min: least share that a depth keeps of the positions that masks may stand behind, in [0, 1].
        generator: source of the random choice.
        may_draft: `[n]` whether masks may stand behind each position; everywhere by default. Only the
            positions before an answer's tokens need them: nothing is drafted inside a prompt.

    Returns:
        Rows ordered by depth, then position.

    Worked example: 8 positions, 3 depths, r = 0.5. Depth 0 keeps all 8, depth 1 keeps 4 of the 7
    rows that stand behind a kept one, depth 2 keeps 2 of those that stand behind these 4.

    >>> rows = conditional_drop(8, k=3, r=0.5, r_min=0.2, generator=torch.Generator().manual_seed(0))
    >>> rows.position[rows.depth == 0].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> rows.position[rows.depth == 1].tolist(), rows.position[rows.depth == 2].tolist()
    ([1, 4, 5, 6], [6, 7])
    """
    position = torch.arange(n)
    positions, depths = [position], [torch.zeros_like(position)]
    if may_draft is not None:
        position = position[may_draft]
    anchors = len(position)
    for depth in range(1, k):
        candidates = position[position + 1 < n] + 1
        kept = min(len(candidates), round(anchors * max(r**depth, r_min)))
        choice = torch.randperm(len(candidates), generator=generator)[:kept].sort().values
        position = candidates[choice]
        positions.append(position)
        depths.append(torch.full_like(position, depth))
    return Rows.of_sample(torch.cat(positions), torch.cat(depths))

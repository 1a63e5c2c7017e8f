"""The loss of parallel drafters: cross-entropy at every depth (An et al. 2025, Eq. 8).

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
Reduction = Literal["per_depth", "token_mean"]


def depth_cross_entropy(
    logits_RV: Tensor, labels_R: Tensor, depths_R: Tensor, reduction: Reduction, teacher_RV: Tensor | None = None
) -> Tensor:
    """Cross-entropy in nats.

    Args:
        logits_RV: `[R, V]` predictions.
        labels_R: `[R]` tokens to predict; `IGNORED` rows do not count.
        depths_R: `[R]` depth of each row.
        reduction: "per_depth" averages within each depth, then over the depths, as Eq. 8 does;
            "token_mean" averages over all rows, so that depths with fewer rows weigh less.
        teacher_RV: `[R, V]` probabilities to predict in place of the tokens. The gradient is that
            of the forward KL divergence from the teacher (Hinton et al. 2015).
    """
    counted_R = (labels_R != IGNORED).float()
    if teacher_RV is None:
        each_R = F.cross_entropy(logits_RV.float(), labels_R, ignore_index=IGNORED, reduction="none")
    else:
        each_R = F.cross_entropy(logits_RV.float(), teacher_RV, reduction="none") * counted_R
    if reduction == "token_mean":
        return each_R.sum() / counted_R.sum().clamp(min=1)
    depths = int(depths_R.max()) + 1
    zeros = torch.zeros(depths, device=logits_RV.device)
    total = zeros.index_add(0, depths_R, each_R)
    count = zeros.index_add(0, depths_R, counted_R)
    return (total / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)


@torch.no_grad()
def depth_accuracy(logits_RV: Tensor, labels_R: Tensor, depths_R: Tensor, k: int) -> Tensor:
    """`[2, k]` per depth: rows predicted correctly, rows counted."""
    counted_R = labels_R != IGNORED
    correct_R = (logits_RV.argmax(-1) == labels_R) & counted_R
    zeros = torch.zeros(k, device=logits_RV.device)
    both = [zeros.index_add(0, depths_R, hit.float()) for hit in (correct_R, counted_R)]
    return torch.stack(both)

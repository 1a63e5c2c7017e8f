"""The loss of scores that decide between the likeliest tokens of a row (DFlash 2).

Shape letters: m rows, V tokens with a logit, C likeliest ones, E inputs of a row's logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paradraft.formats.path_heads import SELECTED

Selecting = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The scores `[m, C]` of tokens, from the inputs `[m, E]` of rows' logits, the tokens' logits and ids `[m, C]`."""


def selection_loss(
    select: Selecting,
    read_mE: Tensor,
    logits_mV: Tensor,
    labels_m: Tensor,
    teacher_mV: Tensor | None,
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns `[m]` losses of the scores, and the tokens `[m]` that decoding drafts.

    The token that the scores should choose, the teacher's likeliest or that of the text, is learnt in place of the
    last of the likeliest tokens where it is not among them.

    Args:
        labels_m: tokens of the text.
        teacher_mV: the teacher's logits, whose distribution over these tokens is learnt; None learns the labels.
        loss: of rows, from logits, labels and the teacher's logits.
    """
    count = min(SELECTED, logits_mV.shape[1])
    with torch.no_grad():
        wanted_m1 = (labels_m if teacher_mV is None else teacher_mV.argmax(-1))[:, None]
        ids_mC = torch.cat([logits_mV.topk(count, dim=-1).indices, wanted_m1], dim=1)
        place_m1 = (ids_mC == wanted_m1).long().argmax(1, keepdim=True)  # `count` where it is not among them
        learnt_mC = torch.arange(count, device=ids_mC.device).repeat(len(ids_mC), 1)
        learnt_mC[:, -1:] = torch.where(place_m1 == count, count, count - 1)
    scores_mC = select(read_mE, logits_mV.gather(1, ids_mC), ids_mC)
    best_m = ids_mC.gather(1, scores_mC.detach()[:, :count].argmax(1, keepdim=True))[:, 0]
    learnt = scores_mC.gather(1, learnt_mC)
    expected_mC = None if teacher_mV is None else teacher_mV.gather(1, ids_mC.gather(1, learnt_mC))
    return loss(learnt, place_m1[:, 0].clamp(max=count - 1), expected_mC), best_m

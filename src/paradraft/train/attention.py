"""The attention rule in the form that a model's attention asks for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel

from paradraft.train.rows import Rows, attention_rule, mask_function

FLEX = "flex_attention"
"""The implementation that skips whole blocks of rows which see nothing of each other. On a CPU it has no backward
pass; SDPA with a dense mask is its twin there."""


def attention_mask(rows: Rows, model: PreTrainedModel) -> Tensor | BlockMask:
    """The mask of a pass over rows `[S, R]`.

    Returns:
        A block mask for flex_attention; else `[S, 1, R, R]`: booleans for SDPA, numbers that are
        added to the scores for eager attention.
    """
    implementation = model.config._attn_implementation
    if implementation == FLEX:
        S, R = rows.position.shape
        return create_block_mask(mask_function(rows), S, None, R, R, device=rows.position.device)
    sees = attention_rule(rows)[:, None]
    if implementation == "eager":
        # Booleans would be taken for 0 and 1.
        return torch.zeros_like(sees, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    return sees

"""A pass by the model's own code, over a cache whose rows stand at different lengths: what `torch.compile` is given.

Shape letters: B rows of a batch, N tokens of a pass, R rows whose logits are wanted, S slots in use, V vocabulary,
D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.models import kv_cache


def hidden_states(
    model: PreTrainedModel,
    storage: kv_cache.Storage,
    slots_S: Tensor,
    tokens_BN: Tensor,
    lengths_B: Tensor,
    depth_BN: Tensor,
    visible_BNN: Tensor,
) -> Tensor:
    """The last hidden states `[B, N, D]` of one pass: a function of tensors, but for the cache it writes.

    The states of a token that sees another without finite keys and values are NaN, and no other states are changed.
    """
    B, N = tokens_BN.shape
    S = slots_S.shape[0]
    # A row that has ended is read on with the others; past the room, where nobody looks, it writes the last slot.
    last_slot = storage[0][0].shape[1] - 1
    written_BN = (lengths_B[:, None] + torch.arange(N, device=tokens_BN.device)).clamp(max=last_slot)
    offset_BS = slots_S[None] - lengths_B[:, None]
    inside_BS = (offset_BS >= 0) & (offset_BS < N)
    index_BNS = offset_BS.clamp(0, N - 1)[:, None].expand(B, N, S)
    sees_BNS = (offset_BS < 0)[:, None] | (inside_BS[:, None] & visible_BNN.gather(2, index_BNS))
    mask = torch.zeros(B, 1, N, S, dtype=model.dtype, device=tokens_BN.device)
    mask = mask.masked_fill(~sees_BNS[:, None], torch.finfo(model.dtype).min)
    cache = kv_cache.SlotCache(storage, written_BN, S)
    hidden_BND = model.model(
        input_ids=tokens_BN.clamp(min=0),
        attention_mask=mask,
        position_ids=lengths_B[:, None] + depth_BN,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    is_finite_BN = (cache.is_finite_BN[:, None] | ~visible_BNN).all(2)
    return hidden_BND.where(is_finite_BN[:, :, None], torch.nan)


def logits(model: PreTrainedModel, storage: kv_cache.Storage, rows_BR: Tensor, *inputs: Tensor) -> Tensor:
    """The logits `[B, R, V]` of some rows of one pass, fit to be compiled."""
    hidden_BND = hidden_states(model, storage, *inputs)
    return model.lm_head(hidden_BND.gather(1, rows_BR[:, :, None].expand(-1, -1, hidden_BND.shape[2])))

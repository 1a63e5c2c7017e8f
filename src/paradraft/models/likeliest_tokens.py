"""The likeliest tokens at each place of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.likeliest import Likeliest
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.draw import likeliest
from paradraft.tree import ABSENT


def likeliest_after(lm: CausalLM, draft: Draft, logits: Tensor, count: int) -> Likeliest:
    """The `count` likeliest tokens after the root and after each node of a draft.

    Args:
        logits: `[B, N + 1, V]` of its pass; those of absent nodes are not read.
    """
    read, parents = draft.lists
    if lm.is_native and logits.dtype == torch.float32:
        read_BM = torch.nn.functional.pad(draft.tokens, (1, 0))
        ids, scores = (values.tolist() for values in likeliest(logits, read_BM, count, threads=lm.threads))
    else:
        best, tokens = logits.float().topk(min(count, logits.shape[-1]), dim=-1)
        tokens = tokens.masked_fill(~(best > -torch.inf), ABSENT)
        rows = torch.stack([tokens.double(), best.double()], dim=2).tolist()  # one transfer
        ids = [[[int(token) for token in place[0]] for place in row] for row in rows]
        scores = [[place[1] for place in row] for row in rows]
    return Likeliest(read=read, parents=parents, tokens=ids, logits=scores)

"""The rejection rule the plain way: every node is tried in every row, and masks say where it counts.

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import torch

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.parents import texts_before
from paradraft.ragged import to_lists
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """What `verify.rejection.verify` does."""
    B, N = draft.tokens.shape
    texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
    p_BMV = sampler.probabilities(out.logits, texts)
    chance_BN = sampler.acceptance_numbers(N)
    rows = torch.arange(B, device=draft.tokens.device)

    left_BV = p_BMV[:, 0]
    here_B = torch.full((B,), -1, device=draft.tokens.device)
    accepted_B = torch.zeros_like(here_B)
    path = torch.full((B, N), ABSENT, device=draft.tokens.device)
    for node in range(N):
        token_B1 = draft.tokens[:, node, None].clamp(min=0)
        if draft.probs is None:
            q_BV = torch.zeros_like(left_BV).scatter(1, token_B1, 1.0)
        else:
            q_BV = draft.probs[:, node].to(left_BV.dtype)
        is_tried = (draft.parents[:, node] == here_B) & (draft.tokens[:, node] != ABSENT)
        p_B, q_B = left_BV.gather(1, token_B1)[:, 0], q_BV.gather(1, token_B1)[:, 0]
        is_kept = is_tried & (chance_BN[:, node] * q_B < p_B)

        rest_BV = (left_BV - q_BV).clamp(min=0.0)
        total_B1 = rest_BV.sum(1, keepdim=True)
        # Nothing is left only if p = q up to rounding; then a rejection has no probability either.
        rest_BV = torch.where(total_B1 > 0, rest_BV / total_B1, left_BV)
        left_BV = torch.where((is_tried & ~is_kept)[:, None], rest_BV, left_BV)
        left_BV = torch.where(is_kept[:, None], p_BMV[:, node + 1], left_BV)
        path[rows, accepted_B] = torch.where(is_kept, node, path[rows, accepted_B])
        here_B = torch.where(is_kept, node, here_B)
        accepted_B = accepted_B + is_kept
    return Verdict.of(draft, to_lists(path), sampler.draw_next(left_BV).tolist())

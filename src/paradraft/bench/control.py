"""The audit's control: a wrong rule, which a test of losslessness must catch."""

from __future__ import annotations

import torch

from paradraft.core import ABSENT, Draft, TargetOut, Verdict
from paradraft.sampler import Sampler
from paradraft.tree import row_behind


def accept_all(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Takes the first path of every draft without asking the target."""
    B, N = draft.tokens.shape
    path = torch.full((B, N), ABSENT, device=draft.tokens.device)
    for row, (tokens, parents) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        last, depth = -1, 0
        for node in range(N):
            if parents[node] == last and tokens[node] != ABSENT:
                path[row, depth] = last = node
                depth += 1
    last_BN1 = row_behind(path)[:, :, None].expand(-1, -1, out.logits.shape[2])
    probs = sampler.probabilities(out.logits.gather(1, last_BN1))
    return Verdict.of(draft, path, sampler.draw_next(probs[:, 0]))

"""Verification by rejection: speculative sampling, for chains and trees.

A drafted token x is kept with probability min(1, p(x) / q(x)); after a rejection p becomes
norm(max(p - q, 0)), against which the next sibling is tried, and the token that ends the round is
drawn from what p is then (Leviathan et al. 2023, Alg. 1; Chen et al. 2023, Alg. 2; for siblings
ParallelSpec, Xiao et al. 2024, Alg. 1). q is the distribution that the token was really drawn from,
so a token that was chosen deterministically has q(x) = 1. The emitted tokens have exactly the
target's distribution, but which ones they are depends on the draft.

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import torch

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, texts_before


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Decides which drafted tokens are kept and which token follows them.

    Nodes are tried in the order of their indices, each only where its parent has just been
    accepted. So parents come before children, and siblings are tried one after the other.

    Args:
        draft: the proposed tree.
        out: the target's pass over it.
        sampler: how the target chooses in each row.

    Worked example: p is 0.5 for the drafted token and q is 1, because it was chosen
    deterministically. It is kept in half of all rounds; else p without it is drawn from.

    >>> from paradraft.core import Drafting, Request
    >>> from paradraft.sampling_params import Sampling
    >>> logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 2, 3)
    >>> draft = Draft.chain(torch.zeros(1000, 1, dtype=torch.long))
    >>> samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(1000)]
    >>> requests = [Request(tokens=[1], sampling=sampling) for sampling in samplings]
    >>> sampler = Sampler(requests, drafting=Drafting(rule="rejection"))
    >>> verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler)
    >>> [(verdict.tokens[:, 0] == token).sum().item() for token in range(3)]
    [490, 319, 191]
    """
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
        q_BV = torch.zeros_like(left_BV).scatter(1, token_B1, 1.0) if draft.probs is None else draft.probs[:, node]
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
    return Verdict.of(draft, path, sampler.draw_next(left_BV))

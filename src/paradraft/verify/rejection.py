"""Verification by rejection: speculative sampling, for chains and trees.

A drafted token x is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes the residual
norm(max(p - q, 0)), against which the next sibling is tried, and the recovered or bonus token is drawn from the final p
(Leviathan et al. 2023, Alg. 1; Chen et al. 2023, Alg. 2; for siblings ParallelSpec, Xiao et al. 2024, Alg. 1). q is the
distribution that the token was drawn from, so a token that was chosen deterministically has q(x) = 1. The emitted
tokens have exactly the target's distribution, but their values depend on the draft.

Shape letters: B rows of a batch, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.parents import texts_before
from paradraft.ragged import to_lists
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Draws
from paradraft.tree import ABSENT
from paradraft.verify import Rule


def verify(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Decides the accepted tokens and the recovered or bonus token.

    Nodes are tried in the order of their indices, each only if its parent has just been accepted. So parents come
    before children, and siblings are tried one after the other.

    Worked example: p is 0.5 for the drafted token and q is 1, because it was chosen deterministically. It is accepted
    in half of all rounds; otherwise a token is drawn from p without it.

    >>> from paradraft.core import Drafting, Request
    >>> from paradraft.sampling_params import Sampling
    >>> logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1000, 2, 3)
    >>> draft = Draft.chain(torch.zeros(1000, 1, dtype=torch.long))
    >>> samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(1000)]
    >>> requests = [Request(tokens=[1], sampling=sampling) for sampling in samplings]
    >>> sampler = Sampler(requests, drafting=Drafting(draws="numbers"))
    >>> verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler)
    >>> [[tokens[0] for tokens in verdict.tokens].count(token) for token in range(3)]
    [490, 318, 192]
    """
    (B, N), device = draft.tokens.shape, draft.tokens.device
    texts = texts_before(draft.tokens, draft.parents) if sampler.reads_text else None
    chance_BN = sampler.acceptance_numbers(N)
    rows_B = torch.arange(B, device=device)
    token_BN = draft.tokens.clamp(min=0)
    here_B = torch.full((B,), -1, device=device)
    accepted_B = torch.zeros_like(here_B)
    path = torch.full((B, N), ABSENT, device=device)
    is_untried_BN = draft.tokens != ABSENT

    left_BV = p_after(here_B, out, texts, sampler)
    while N:
        # Tries the children of `here` one after the other; a row that has accepted one waits for the others.
        before_B = accepted_B
        while True:
            is_child_BN = is_untried_BN & (draft.parents == here_B[:, None]) & (accepted_B == before_B)[:, None]
            is_tried_B, node_B = is_child_BN.max(1)
            if not bool(is_tried_B.any()):
                break
            is_untried_BN[rows_B, node_B] &= ~is_tried_B
            token_B = token_BN[rows_B, node_B]
            p_B = left_BV[rows_B, token_B]
            q_B = torch.ones_like(p_B) if draft.probs is None else draft.probs[rows_B, node_B, token_B]
            is_kept_B = is_tried_B & (chance_BN[rows_B, node_B] * q_B < p_B)
            rejected_b = (is_tried_B & ~is_kept_B).nonzero()[:, 0]
            if len(rejected_b):
                q_bV = None if draft.probs is None else draft.probs[rejected_b, node_B[rejected_b]]
                rest_bV = _residual(left_BV[rejected_b], token_B[rejected_b], q_bV)
                left_BV = left_BV.index_put((rejected_b,), rest_bV)
            path[rows_B, accepted_B] = torch.where(is_kept_B, node_B, path[rows_B, accepted_B])
            here_B = torch.where(is_kept_B, node_B, here_B)
            accepted_B = accepted_B + is_kept_B
        has_moved_B = accepted_B > before_B
        if not bool(has_moved_B.any()):
            break
        left_BV = torch.where(has_moved_B[:, None], p_after(here_B, out, texts, sampler), left_BV)
    ends = to_lists(torch.cat([path, sampler.draw_next(left_BV)[:, None]], dim=1))
    return Verdict.of(draft, [end[:-1] for end in ends], [end[-1] for end in ends])


def p_after(node_B: Tensor, out: TargetOut, texts: Tensor | None, sampler: Sampler) -> Tensor:
    """The target's distributions `[B, V]` after these nodes: most nodes are never reached."""
    rows_B = torch.arange(len(node_B), device=node_B.device)
    paths = None if texts is None else texts[rows_B, node_B + 1][:, None]
    return sampler.probabilities(out.logits[rows_B, node_B + 1][:, None], paths)[:, 0]


def _residual(p_BV: Tensor, token_B: Tensor, q_BV: Tensor | None) -> Tensor:
    """The residual distribution after a rejection of `token_B`: norm(max(p - q, 0)); `q_BV` None is deterministic."""
    rest_BV = p_BV.scatter(1, token_B[:, None], 0.0) if q_BV is None else (p_BV - q_BV).clamp(min=0.0)
    total_B1 = rest_BV.sum(1, keepdim=True)
    # The residual is 0 only if p = q up to rounding; then a rejection has probability 0 too.
    return torch.where(total_B1 > 0, rest_BV / total_B1, p_BV)


@dataclass(frozen=True, kw_only=True)
class Rejection(Rule):
    """The rule; it has no settings."""

    draws: ClassVar[Draws] = "numbers"
    is_of_vllm: ClassVar[bool] = True

    def __call__(self, draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        """See `verify`."""
        return verify(draft, out, sampler)


RULE = Rejection

"""Losses of parallel drafters: the loss of each row, and the weights of rows.

A row learns either the token of the text (cross-entropy, An et al. 2025, Eq. 8) or the teacher's distribution: the
loss is a divergence of the drafter's q from the teacher's p.

Shape letters: R rows, V vocabulary, K depths.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of a row without loss."""
IMPOSSIBLE = -1e4
"""A logit so low that its probability is 0, and its products with 0 are 0 and not NaN."""
Reduction = Literal["per_depth", "token_mean"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"]


def cross_entropy(logits_RV: Tensor, labels_R: Tensor) -> Tensor:
    """`[R]` cross-entropy in nats with the tokens of the text."""
    return F.cross_entropy(logits_RV.float(), labels_R, reduction="none")


def divergence(logits_RV: Tensor, teacher_RV: Tensor, kind: Divergence) -> Tensor:
    """`[R]` divergence of the drafter's q from the teacher's p; 0 where they agree.

    - "forward_kl": KL(p ‖ q) in nats (Hinton et al. 2015); mode-covering.
    - "reverse_kl": KL(q ‖ p); mode-seeking.
    - "jensen_shannon": the mean of the KLs of p and q from their mixture; at most log 2.
    - "total_variation": half the sum of |p - q|: the share of drafts that the rejection rule rejects
      (Leviathan et al. 2023, Corollary 3.6).

    Tokens that decoding never chooses, to which the teacher gives probability 0, are not compared. Instead
    -log q(all other tokens), which is unbounded, is added to each divergence: our decoding never drafts these tokens,
    but other engines draft the likeliest token, and logits without a loss drift up. With "forward_kl" the sum is the
    KL over all tokens.

    Args:
        teacher_RV: logits of the teacher; at most `IMPOSSIBLE` for tokens that decoding never chooses.
    """
    p_RV = teacher_RV.float().clamp(min=IMPOSSIBLE).log_softmax(1)
    if kind == "forward_kl":
        divergence_R: Tensor = _ForwardKl.apply(logits_RV, p_RV)  # with both parts in it
        return divergence_R
    never_RV = teacher_RV <= IMPOSSIBLE
    q_RV = logits_RV.float().log_softmax(1).masked_fill(never_RV, IMPOSSIBLE)
    surprise_R = -q_RV.logsumexp(1)
    q_RV = q_RV + surprise_R[:, None]
    if kind == "reverse_kl":
        return surprise_R + _kl(q_RV, p_RV)
    if kind == "jensen_shannon":
        mixture_RV = torch.logaddexp(p_RV, q_RV) - math.log(2)
        return surprise_R + (_kl(p_RV, mixture_RV) + _kl(q_RV, mixture_RV)) / 2
    return surprise_R + (p_RV.exp() - q_RV.exp()).abs().sum(1) / 2


class _ForwardKl(torch.autograd.Function):
    """KL(p ‖ q) of each row, from logits `[R, V]` and constant log p `[R, V]`.

    The gradient is q - p; autograd alone would go through a dozen tensors of this size.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, log_p_RV: Tensor) -> Tensor:
        log_q_RV, p_RV = logits_RV.float().log_softmax(1), log_p_RV.exp()
        ctx.save_for_backward(log_q_RV, p_RV)
        ctx.dtype = logits_RV.dtype
        return torch.linalg.vecdot(p_RV, log_p_RV) - torch.linalg.vecdot(p_RV, log_q_RV)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_q_RV, p_RV = ctx.saved_tensors
        return log_q_RV.exp().sub_(p_RV).mul_(gradients[0][:, None]).to(ctx.dtype), None


def _kl(log_a_RV: Tensor, log_b_RV: Tensor) -> Tensor:
    return (log_a_RV.exp() * (log_a_RV - log_b_RV)).sum(1)


def row_weights(labels_K: Tensor, reduction: Reduction, importance_K: Tensor) -> Tensor:
    """`[K]` weight of a row of each depth, so that the loss is the weighted sum over all rows; all 0 without labels.

    Args:
        labels_K: rows with a label at each depth in the whole step.
        reduction: "per_depth" averages within each depth, then over the depths, as Eq. 8 does;
            "token_mean" averages over all rows, so that depths with fewer rows weigh less.
        importance_K: weight of each depth in that average.

    >>> row_weights(torch.tensor([4, 2, 0]), "per_depth", torch.ones(3)).tolist()
    [0.125, 0.25, 0.0]
    >>> row_weights(torch.tensor([6, 2, 0]), "token_mean", torch.ones(3)).tolist()
    [0.125, 0.125, 0.0]
    """
    is_there_K = (labels_K > 0).float()
    weights_K = importance_K / labels_K.clamp(min=1) if reduction == "per_depth" else importance_K
    total = (importance_K * (is_there_K if reduction == "per_depth" else labels_K)).sum()
    return weights_K * is_there_K / total.clamp(min=torch.finfo(torch.float32).tiny)

"""Losses of parallel drafters: the loss of each row, and the weights of rows.

A row learns either the token of the text (cross-entropy, An et al. 2025, Eq. 8) or the teacher's distribution: the
loss is a divergence of the drafter's q from the teacher's p.

Shape letters: R rows, V vocabulary, K depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of a row without loss."""
IMPOSSIBLE = -1e4
"""A logit so low that its probability is 0, and its products with 0 are 0 and not NaN."""
Reduction = Literal["per_depth", "token_mean"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance"]
DIVERGENCE_NAMES = ", ".join(get_args(Divergence)[:-1]) + f" or {get_args(Divergence)[-1]}"
TINY = 1e-30
"""Probabilities below this are computed as logarithms."""


def cross_entropy(logits_RV: Tensor, labels_R: Tensor) -> Tensor:
    """`[R]` cross-entropy in nats with the tokens of the text."""
    return F.cross_entropy(_numbers(logits_RV), labels_R, reduction="none")


def divergence(logits_RV: Tensor, teacher_RV: Tensor, kind: Divergence) -> Tensor:
    """`[R]` divergence of the drafter's q from the teacher's p; 0 where they agree.

    - "forward_kl": KL(p ‖ q) in nats (Hinton et al. 2015); mode-covering.
    - "reverse_kl": KL(q ‖ p); mode-seeking.
    - "jensen_shannon": the mean of the KLs of p and q from their mixture; at most log 2.
    - "total_variation": 1 - α, where α, the sum of min(p, q), is the share of drafts that the rejection rule accepts
      (Leviathan et al. 2023, Corollary 3.6). TVD++ (Goel et al. 2024) has the same gradient up to a factor where, as
      here, p is known for all tokens.
    - "acceptance": -log α (LK, 2602.23881): the gradient of "total_variation", divided by α.

    Tokens that decoding never chooses, to which the teacher gives probability 0, are not compared. Instead
    -log q(all other tokens), which is unbounded, is added to each divergence: our decoding never drafts these tokens,
    but other engines draft the likeliest token, and logits without a loss drift up. With "forward_kl" the sum is the
    KL over all tokens.

    Args:
        teacher_RV: logits of the teacher; at most `IMPOSSIBLE` for tokens that decoding never chooses.
    """
    numbers_RV = _numbers(logits_RV)
    return DIVERGENCES[kind](numbers_RV, teacher_RV.to(numbers_RV.dtype))


def _forward_kl(logits_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    divergence_R: Tensor = _ForwardKl.apply(logits_RV, _log_p(teacher_RV))
    return divergence_R


def _reverse_kl(logits_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    surprise_R, q_RV = _compared(logits_RV, teacher_RV)
    return surprise_R + _kl(q_RV, _log_p(teacher_RV))


def _jensen_shannon(logits_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    (surprise_R, q_RV), p_RV = _compared(logits_RV, teacher_RV), _log_p(teacher_RV)
    mixture_RV = torch.logaddexp(p_RV, q_RV) - math.log(2)
    return surprise_R + (_kl(p_RV, mixture_RV) + _kl(q_RV, mixture_RV)) / 2


def _total_variation(logits_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    surprise_R, log_alpha_R = _Overlap.apply(logits_RV, teacher_RV)
    return surprise_R - torch.expm1(log_alpha_R)


def _acceptance(logits_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    surprise_R, log_alpha_R = _Overlap.apply(logits_RV, teacher_RV)
    return surprise_R - log_alpha_R


DIVERGENCES: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
    "acceptance": _acceptance,
}


@torch.no_grad()
def acceptance(logits_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    """`[R]` α, the share of drafts drawn from q that the rejection rule accepts."""
    numbers_RV = _numbers(logits_RV)
    log_alpha_R: Tensor = _Overlap.apply(numbers_RV, teacher_RV.to(numbers_RV.dtype))[1]
    return log_alpha_R.exp()


class _ForwardKl(torch.autograd.Function):
    """KL(p ‖ q) of each row, from logits `[R, V]` and constant log p `[R, V]`.

    The gradient is q - p; autograd alone would go through a dozen tensors of this size.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, log_p_RV: Tensor) -> Tensor:
        log_q_RV, p_RV = logits_RV.log_softmax(1), log_p_RV.exp()
        ctx.save_for_backward(log_q_RV, p_RV)
        return torch.linalg.vecdot(p_RV, log_p_RV) - torch.linalg.vecdot(p_RV, log_q_RV)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_q_RV, p_RV = ctx.saved_tensors
        return log_q_RV.exp().sub_(p_RV).mul_(gradients[0][:, None]), None


class _Overlap(torch.autograd.Function):
    """-log q(all tokens that p compares) and log α of each row, from logits and the teacher's, `[R, V]`.

    With q as of the compared tokens alone and s the shares that tokens with q < p have in α, the gradient of log α is
    s - q Σ s.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, teacher_RV: Tensor) -> tuple[Tensor, Tensor]:
        whole_RV, p_RV = logits_RV.softmax(1), teacher_RV.softmax(1)
        q_RV = whole_RV * (teacher_RV > IMPOSSIBLE)
        compared_R = q_RV.sum(1)
        q_RV.div_(compared_R[:, None])
        shares_RV = torch.minimum(p_RV, q_RV)
        alpha_R = shares_RV.sum(1)
        shares_RV.masked_fill_(q_RV >= p_RV, 0.0).div_(alpha_R[:, None])
        surprise_R, log_alpha_R = -compared_R.log(), alpha_R.log()
        if len(far_m := (~(alpha_R * compared_R > TINY)).nonzero()[:, 0]):
            log_p_mV = _log_p(teacher_RV[far_m])
            surprise_R[far_m], log_q_mV = _compared(logits_RV[far_m], teacher_RV[far_m])
            log_alpha_R[far_m] = torch.minimum(log_p_mV, log_q_mV).logsumexp(1)
            q_RV[far_m] = log_q_mV.exp()
            shares_mV = (log_q_mV - log_alpha_R[far_m, None]).exp()
            shares_RV[far_m] = shares_mV.masked_fill(log_q_mV >= log_p_mV, 0.0)
        ctx.save_for_backward(whole_RV, q_RV, shares_RV)
        return surprise_R, log_alpha_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole_RV, q_RV, shares_RV = ctx.saved_tensors
        of_surprise_R1, of_alpha_R1 = (gradient[:, None] for gradient in gradients)
        # -log q(compared) = logsumexp(all) - logsumexp(compared), whose gradients are the two softmaxes.
        slope_RV = shares_RV * of_alpha_R1
        slope_RV.addcmul_(q_RV, of_surprise_R1 + of_alpha_R1 * shares_RV.sum(1, keepdim=True), value=-1)
        return slope_RV.addcmul_(whole_RV, of_surprise_R1), None


def _numbers(logits: Tensor) -> Tensor:
    """In float32, or float64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_p(teacher_RV: Tensor) -> Tensor:
    return teacher_RV.clamp(min=IMPOSSIBLE).log_softmax(1)


def _compared(logits_RV: Tensor, teacher_RV: Tensor) -> tuple[Tensor, Tensor]:
    """`[R]` -log q(all tokens that decoding may choose), and `[R, V]` log q given these."""
    q_RV = logits_RV.log_softmax(1).masked_fill(teacher_RV <= IMPOSSIBLE, IMPOSSIBLE)
    surprise_R = -q_RV.logsumexp(1)
    return surprise_R, q_RV + surprise_R[:, None]


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

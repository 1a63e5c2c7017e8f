"""Muon: momentum with orthogonalised updates.

Shape letters: B matrices of one shape, M by N; R and C the shorter and the longer of these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from paradraft.models.runtime import computes_bf16

# Quintic Newton-Schulz coefficients: Jordan et al. 2024, "Muon: An optimizer for hidden layers".
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_TOGETHER = 2**25


def orthogonalize(matrices_BMN: Tensor) -> Tensor:
    """Sets all singular values near one, by Newton-Schulz iterations.

    Args:
        matrices_BMN: `[B, M, N]` matrices, in the dtype to compute in.

    Returns:
        `[B, M, N]`; singular values above a five-hundredth of the matrix's norm become about 0.7 to
        1.2, smaller ones grow, and zeros stay.
    """
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x_BRC = matrices_BMN.mT if is_tall else matrices_BMN
    x_BRC = x_BRC / x_BRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram_BRR = x_BRC @ x_BRC.mT
        polynomial_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=_B, alpha=_C)
        x_BRC = torch.baddbmm(x_BRC, polynomial_BRR, x_BRC, beta=_A)
    return x_BRC.mT if is_tall else x_BRC


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for matrices (Jordan et al. 2024).

    The same rule as `torch.optim.Muon`, which always computes in bf16, one matrix at a time (see
    docs/decisions.md, 14). Here the dtype is the device's fast one, and matrices of one shape are
    computed together, at most `_TOGETHER` numbers at once.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate.
        weight_decay: decoupled, times lr.
        momentum: of the Nesterov momentum.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        matrices = list(matrices)
        assert all(matrix.ndim == 2 for matrix in matrices)
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    # torch's `step` is overloaded for closures that compute the loss again; nobody here has one.
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                number = max(_TOGETHER // shape.numel(), 1)
                for start in range(0, len(matrices), number):
                    self._update(
                        matrices[start : start + number], group["lr"], group["weight_decay"], group["momentum"]
                    )

    def _update(self, matrices: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        updates = torch.stack([self._momentum(matrix, momentum) for matrix in matrices])
        dtype = torch.bfloat16 if computes_bf16(updates.device) else torch.float32
        # Tall matrices move further, so that every output changes by about lr.
        rows, columns = matrices[0].shape
        scale = -lr * math.sqrt(max(1.0, rows / columns))
        for matrix, update in zip(matrices, orthogonalize(updates.to(dtype)), strict=True):
            matrix.mul_(1 - lr * weight_decay)
            matrix.add_(update.to(matrix.dtype), alpha=scale)

    def _momentum(self, matrix: torch.nn.Parameter, momentum: float) -> Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        average: Tensor = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)

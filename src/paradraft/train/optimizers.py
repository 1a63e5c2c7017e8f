"""Optimizers and their schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paradraft.models.loading import computes_bf16

# Quintic Newton-Schulz coefficients: Jordan et al. 2024, "Muon: An optimizer for hidden layers".
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalize(matrices_BMN: Tensor) -> Tensor:
    """Sets all singular values near one, by Newton-Schulz iterations.

    Args:
        matrices_BMN: `[B, M, N]` matrices, in the dtype to compute in.

    Returns:
        `[B, M, N]`; singular values lie in about [0.7, 1.2].
    """
    is_tall = matrices_BMN.shape[1] > matrices_BMN.shape[2]
    x = matrices_BMN.mT if is_tall else matrices_BMN
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates, for matrices (Jordan et al. 2024).

    The same rule as `torch.optim.Muon`, which always computes in bf16, one matrix at a time: on a
    CPU without bf16 instructions that is forty times slower than float32. Here the dtype is the
    device's fast one, and matrices of one shape are computed together.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate.
        weight_decay: decoupled, times lr.
        momentum: of the Nesterov momentum.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                updates = torch.stack([self._momentum(matrix, group["momentum"]) for matrix in matrices])
                dtype = torch.bfloat16 if computes_bf16(updates.device) else torch.float32
                # Tall matrices move further, so that every output changes by about lr.
                scale = -group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for matrix, update in zip(matrices, orthogonalize(updates.to(dtype)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update.to(matrix.dtype), alpha=scale)

    def _momentum(self, matrix: torch.nn.Parameter, momentum: float) -> Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        average: Tensor = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum)


class Optimizers:
    """Muon for the hidden matrices and AdamW for the rest, or AdamW alone, as one.

    The learning rate warms up linearly and decays linearly to zero.

    Args:
        model: whose parameters are trained.
        muon_lr: Muon's highest learning rate; None trains everything with AdamW.
        lr: AdamW's highest learning rate.
        weight_decay: of the hidden matrices.
        warmup_steps: steps until the highest rate.
        steps: steps until zero.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        muon_lr: float | None,
        lr: float,
        weight_decay: float,
        warmup_steps: int,
        steps: int,
    ) -> None:
        hidden: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (hidden if is_hidden else rest).append(parameter)
        self.warmup_steps = warmup_steps
        self.steps = steps
        self._members: list[tuple[torch.optim.Optimizer, float]] = []
        if muon_lr is None:
            groups: list[dict[str, Any]] = [{"params": hidden, "weight_decay": weight_decay}, {"params": rest}]
            self._add(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), lr)
        else:
            self._add(Muon(hidden, lr=muon_lr, weight_decay=weight_decay), muon_lr)
            self._add(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), lr)

    def _add(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        self._members.append((optimizer, lr))

    def factor(self, step: int) -> float:
        """The share of the highest learning rate at a step, counted from 0."""
        warm = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        return min(1.0, warm, (self.steps - step) / max(self.steps - self.warmup_steps, 1))

    def step(self, step: int) -> None:
        """Updates the parameters and clears their gradients."""
        for optimizer, lr in self._members:
            for group in optimizer.param_groups:
                group["lr"] = lr * self.factor(step)
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of all members."""
        return [optimizer.state_dict() for optimizer, _ in self._members]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Goes on from saved states."""
        for (optimizer, _), state in zip(self._members, states, strict=True):
            optimizer.load_state_dict(state)

"""Optimizers: Muon (momentum with orthogonalised updates), AdamW, learning rate schedule, gradient clipping.

Shape letters: B matrices of one shape, M by N; R and C the shorter and the longer of these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from paradraft.models.devices import computes_bf16

# Quintic Newton-Schulz coefficients: Jordan et al. 2024, "Muon: An optimizer for hidden layers".
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_BATCH_ELEMENTS = 2**25


def orthogonalize(matrices_BMN: Tensor) -> Tensor:
    """Orthogonalizes matrices, in their dtype, by Newton-Schulz iterations.

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

    The same update as `torch.optim.Muon`, which always computes in bf16, one matrix at a time (see
    docs/decisions.md, 14). Here the dtype is the device's fast one, and matrices of one shape are batched, up to
    `_BATCH_ELEMENTS` elements.

    Args:
        matrices: parameters of two dimensions.
        weight_decay: decoupled, times lr.
        momentum: of Nesterov's kind.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        matrices = list(matrices)
        assert all(matrix.ndim == 2 for matrix in matrices)
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    # torch's `step` is overloaded for closures that recompute the loss; none is used here.
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # of its two overloads one
        """Updates all matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                size = max(_BATCH_ELEMENTS // shape.numel(), 1)
                for start in range(0, len(matrices), size):
                    self._update(matrices[start : start + size], group["lr"], group["weight_decay"], group["momentum"])

    def _update(self, matrices: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        updates = torch.stack([self._momentum(matrix, momentum) for matrix in matrices])
        dtype = torch.bfloat16 if computes_bf16(updates.device) else torch.float32
        # Tall matrices get larger updates, so that every output changes by about lr.
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


MOST_SKIPPED = 3
"""Steps in a row without finite gradients that are skipped; after one more the run ends."""
Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]
STABLE = 0.8
"""Share of the steps after the warm-up in which `warmup_stable_decay` keeps the highest rate."""


WITHOUT_MUON = "without_muon"
"""Attribute of a module whose matrices AdamW trains too: one that corrects predictions, and begins at zero."""


def hidden_and_rest(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Splits the trained parameters into the matrices between embedding and head, and all others."""
    hidden: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (hidden if is_hidden else rest).append(parameter)
    return hidden, rest


def without_muon(model: torch.nn.Module) -> set[int]:
    """`id()` of the parameters of modules that say `WITHOUT_MUON`."""
    return {id(weight) for part in model.modules() if hasattr(part, WITHOUT_MUON) for weight in part.parameters()}


class Optimizers:
    """Muon for the hidden matrices and AdamW for the rest, or AdamW alone, as one optimizer.

    The learning rate warms up linearly, then follows the schedule. It reaches zero after the last step, not in it.

    Gradients are clipped by one norm over all parameters, AdamW's and Muon's alike, before momentum. The size of
    Muon's update does not depend on the size of the gradient; there, clipping bounds the weight of a step in the
    momentum.

    Args:
        muon_lr: Muon's highest learning rate; None trains all parameters with AdamW.
        lr: AdamW's highest learning rate.
        warmup_steps: steps until the highest rate.
        schedule: of the rate after the warm-up: "constant"; "linear" and "cosine" decay to zero;
            "warmup_stable_decay" is constant for a share of `STABLE`, then decays linearly to zero.
        max_grad_norm: gradients with a larger norm are scaled down to it; None scales nothing.
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
        schedule: Schedule = "linear",
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float | None = None,
    ) -> None:
        hidden, rest = hidden_and_rest(model)
        self.warmup_steps = warmup_steps
        self.steps = steps
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self._parameters = hidden + rest
        self._skipped = 0
        self._clip: Callable[[list[torch.nn.Parameter], float], Tensor | None] = torch.nn.utils.clip_grad_norm_
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if muon_lr is not None:
            others = without_muon(model)
            if by_muon := [matrix for matrix in hidden if id(matrix) not in others]:
                self._add(Muon(by_muon, lr=muon_lr, weight_decay=weight_decay), muon_lr)
            hidden = [matrix for matrix in hidden if id(matrix) in others]
        groups: list[dict[str, Any]] = [{"params": hidden, "weight_decay": weight_decay}, {"params": rest}]
        self._add(torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0, fused=True), lr)

    def _add(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        self._optimizers.append((optimizer, lr))

    def prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Prepares model and optimizers with accelerate, which distributes them over devices.

        Raises:
            ValueError: Muon with sharded weights: it needs whole matrices.
        """
        is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if is_sharded and any(isinstance(optimizer, Muon) for optimizer, _ in self._optimizers):
            raise ValueError("optimizer=muon needs whole matrices, and FSDP spreads them: use optimizer=adamw")
        prepared, *optimizers = accelerator.prepare(model, *(optimizer for optimizer, _ in self._optimizers))
        self._parameters = list(prepared.parameters())  # all: accelerate recognizes a sharded model by the full list
        self._clip = accelerator.clip_grad_norm_
        rates = [lr for _, lr in self._optimizers]
        self._optimizers = list(zip(optimizers, rates, strict=True))
        return prepared

    def factor(self, step: int) -> float:
        """Learning rate at a step, counted from 0, relative to the highest."""
        warmup = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        decay = (self.steps - step) / max(self.steps - self.warmup_steps, 1)
        if self.schedule == "constant":
            return min(1.0, warmup)
        if self.schedule == "cosine":
            decay = (1 - math.cos(math.pi * min(decay, 1.0))) / 2
        elif self.schedule == "warmup_stable_decay":
            decay = decay / (1 - STABLE)
        return min(1.0, warmup, decay)

    def step(self, step: int, divisor: float = 1.0) -> float | None:
        """Clips the gradients, updates the parameters and clears their gradients.

        A step whose norm is not finite is skipped: it updates nothing.

        Args:
            divisor: of the gradients, before they are clipped.

        Returns:
            The gradient norm before clipping; None if only DeepSpeed knows it.

        Raises:
            ValueError: more than `MOST_SKIPPED` steps in a row are skipped, or DeepSpeed cannot divide.
        """
        if divisor != 1.0:
            self._divide_gradients(divisor)
        norm = self._clip_gradients()
        is_skipped = norm is not None and not math.isfinite(norm)
        self._skipped = self._skipped + 1 if is_skipped else 0
        if self._skipped > MOST_SKIPPED:
            raise ValueError(f"the norm of the gradients became {norm} in step {step + 1}: lower lr or muon_lr")
        for optimizer, lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * self.factor(step)
            if not is_skipped:
                optimizer.step()
            optimizer.zero_grad()
        return norm

    def _divide_gradients(self, divisor: float) -> None:
        gradients = [weight.grad for weight in self._parameters if weight.grad is not None]
        if not gradients:
            raise ValueError("DeepSpeed updates weights before the weights of rows are known: set weighting=none")
        torch._foreach_div_(gradients, divisor)

    def _clip_gradients(self) -> float | None:
        # Without a limit the gradients are multiplied by 1, which is exact.
        norm = self._clip(self._parameters, math.inf if self.max_grad_norm is None else self.max_grad_norm)
        if norm is None:
            return None
        # With sharded weights each process has a part of the norm.
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def state_dict(self) -> list[dict[str, Any]]:
        """States of all optimizers."""
        return [optimizer.state_dict() for optimizer, _ in self._optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restores saved states."""
        for (optimizer, _), state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)

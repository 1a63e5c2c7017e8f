"""Optimizers, their schedule, and the clipping of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from paradraft.train.muon import Muon

Schedule = Literal["constant", "linear", "cosine", "warmup_stable_decay"]
STABLE = 0.8
"""The share of the steps after the warm-up in which the rate of `warmup_stable_decay` stays at its highest."""


def hidden_and_rest(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters that are trained: the matrices between embedding and head, and all others."""
    hidden: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (hidden if is_hidden else rest).append(parameter)
    return hidden, rest


class Optimizers:
    """Muon for the hidden matrices and AdamW for the rest, or AdamW alone, as one.

    The learning rate warms up linearly, then follows the schedule. It reaches zero after the last step, not in it.

    Gradients are clipped by one norm over all parameters, AdamW's and Muon's alike, before any momentum sees them. The
    size of Muon's update does not depend on the size of the gradient; there, clipping bounds what one step weighs in
    the momentum.

    Args:
        model: whose parameters are trained.
        muon_lr: Muon's highest learning rate; None trains everything with AdamW.
        lr: AdamW's highest learning rate.
        weight_decay: of the hidden matrices.
        warmup_steps: steps until the highest rate.
        steps: of the whole run.
        schedule: what the rate does after the warm-up: "constant" stays, "linear" and "cosine" fall to zero,
            "warmup_stable_decay" stays for a share of `STABLE` and falls linearly to zero in the rest.
        betas: AdamW's.
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
        self._clip: Callable[[list[torch.nn.Parameter], float], Tensor | None] = torch.nn.utils.clip_grad_norm_
        self._members: list[tuple[torch.optim.Optimizer, float]] = []
        if muon_lr is None:
            groups: list[dict[str, Any]] = [{"params": hidden, "weight_decay": weight_decay}, {"params": rest}]
            self._add(torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0), lr)
        else:
            self._add(Muon(hidden, lr=muon_lr, weight_decay=weight_decay), muon_lr)
            self._add(torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=0.0), lr)

    def _add(self, optimizer: torch.optim.Optimizer, lr: float) -> None:
        self._members.append((optimizer, lr))

    def prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Hands model and optimizers to accelerate, which spreads them over devices.

        Raises:
            ValueError: Muon, where weights are spread over processes: it needs whole matrices.
        """
        is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if is_sharded and any(isinstance(optimizer, Muon) for optimizer, _ in self._members):
            raise ValueError("optimizer=muon needs whole matrices, and FSDP spreads them: use optimizer=adamw")
        prepared, *optimizers = accelerator.prepare(model, *(optimizer for optimizer, _ in self._members))
        self._parameters = list(prepared.parameters())  # all of them: accelerate knows a sharded model by its list
        self._clip = accelerator.clip_grad_norm_
        rates = [lr for _, lr in self._members]
        self._members = list(zip(optimizers, rates, strict=True))
        return prepared

    def factor(self, step: int) -> float:
        """The share of the highest learning rate at a step, counted from 0."""
        warm = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        left = (self.steps - step) / max(self.steps - self.warmup_steps, 1)
        if self.schedule == "constant":
            return min(1.0, warm)
        if self.schedule == "cosine":
            left = (1 - math.cos(math.pi * min(left, 1.0))) / 2
        elif self.schedule == "warmup_stable_decay":
            left = left / (1 - STABLE)
        return min(1.0, warm, left)

    def step(self, step: int) -> float | None:
        """Clips the gradients, updates the parameters and clears their gradients.

        Returns:
            The gradients' norm before they were clipped; None where only DeepSpeed knows it.

        Raises:
            ValueError: the norm is no number; nothing is updated.
        """
        norm = self._clip_gradients()
        if norm is not None and not math.isfinite(norm):
            raise ValueError(f"the norm of the gradients became {norm} in step {step + 1}: lower lr or muon_lr")
        for optimizer, lr in self._members:
            for group in optimizer.param_groups:
                group["lr"] = lr * self.factor(step)
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def _clip_gradients(self) -> float | None:
        # Without a limit the gradients are multiplied by 1, which changes no bit.
        norm = self._clip(self._parameters, math.inf if self.max_grad_norm is None else self.max_grad_norm)
        if norm is None:
            return None
        # Where weights are spread over processes, each has a part of the norm.
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of all members."""
        return [optimizer.state_dict() for optimizer, _ in self._members]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Goes on from saved states."""
        for (optimizer, _), state in zip(self._members, states, strict=True):
            optimizer.load_state_dict(state)

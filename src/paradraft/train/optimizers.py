"""Optimizers and their schedule."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from paradraft.train.muon import Muon


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
            if not parameter.requires_grad:
                continue
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

    def prepare(self, accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
        """Hands model and optimizers to accelerate, which spreads them over devices.

        Raises:
            ValueError: Muon, where weights are spread over processes: it needs whole matrices.
        """
        is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if is_sharded and any(isinstance(optimizer, Muon) for optimizer, _ in self._members):
            raise ValueError("optimizer=muon needs whole matrices, and FSDP spreads them: use optimizer=adamw")
        prepared, *optimizers = accelerator.prepare(model, *(optimizer for optimizer, _ in self._members))
        rates = [lr for _, lr in self._members]
        self._members = list(zip(optimizers, rates, strict=True))
        return prepared

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

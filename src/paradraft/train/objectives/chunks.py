"""Sums losses over rows in chunks, with the gradients of each chunk computed at once.

The logits of a row take a hundred times the memory of its state. So the gradients of the state and of the head's
weights are computed with the chunk's logits, and only these are kept: no logits are computed twice, and on a CPU a
chunk's fit into its caches (as in Hsu et al. 2024, Liger Kernel, section 3.2).

Shape letters: X rows, M of these in the sum, m of a chunk, D width of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS = {"cpu": 2**22}
"""Most logits in memory at a time by type of device: 16 MB in float32, and as much again for each step of the loss."""
OTHER_LOGITS = 2**26
"""The same on other devices, which need many rows at a time."""


def logits_at_once(device: torch.device) -> int:
    """Most logits that a loss has in memory at a time."""
    return LOGITS.get(device.type, OTHER_LOGITS)


def rows_at_once(ids: int, device: torch.device) -> int:
    """Most rows whose logits, each of this many ids, a loss has in memory at a time."""
    return max(logits_at_once(device) // ids, 1)


Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From states `[m, D]` of rows and the rows' indices `[m]` to the sum of their losses and `[m, …]` further values."""


def sum_in_chunks(
    loss: Loss, states_XD: Tensor, chunks: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Sums a loss over some rows.

    Args:
        chunks: the rows `[m]` of each chunk, M in all, each once; at least one.
        weights: all trained weights that `loss` may read; no other weights get gradients.

    Returns:
        The sum, and `[M, …]` further values of the rows, in the order of the chunks, which have no gradient.
    """
    total, values_M = _SumInChunks.apply(loss, weights, chunks, states_XD, *weights)
    return total, values_M


class _SumInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Loss, weights: Sequence[Tensor], chunks: Sequence[Tensor], states_XD: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        has_gradients = any(ctx.needs_input_grad)
        states_XD = states_XD.detach()
        of_states_XD = torch.zeros_like(states_XD) if has_gradients else None
        of_weights: list[Tensor | None] = [None] * len(weights)
        total, values = torch.zeros((), device=states_XD.device), []
        for rows_m in chunks:
            with torch.set_grad_enabled(has_gradients):
                states_mD = states_XD[rows_m].requires_grad_(has_gradients)
                sum_, values_m = loss(states_mD, rows_m)
            total += sum_.detach()
            values.append(values_m)
            if of_states_XD is not None:
                of_states_mD, *more = torch.autograd.grad(sum_, [states_mD, *weights], allow_unused=True)
                of_states_XD[rows_m] = of_states_mD
                for index, gradient in enumerate(more):
                    before = of_weights[index]
                    of_weights[index] = gradient if before is None or gradient is None else before.add_(gradient)
        values_M = torch.cat(values)
        ctx.gradients = of_states_XD, *of_weights
        ctx.mark_non_differentiable(values_M)
        return total, values_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(None if each is None else of_total * each for each in ctx.gradients)

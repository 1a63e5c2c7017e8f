"""Sampling of tokens from logits, and the likeliest tokens, in C++ (`draw.cpp`).

Shape letters: B rows of a batch, R positions, C tokens of a position, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import library
from paradraft.sampling_params import Sampling


class _Choice(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("seed", "top_k")),
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("temperature", "min_log_ratio")),
    )


def draw(logits_BRV: Tensor, samplings: Sequence[Sampling], positions_BR: Tensor, *, threads: int) -> Tensor | None:
    """The tokens `[B, R]` that `Sampler.draw` chooses, `INVALID` where logits are NaN or the largest is infinite.

    Args:
        logits_BRV: after bias, penalties and logits processors, on the CPU.
        samplings: of the rows.
        positions_BR: of the tokens in their texts; below 0 the token is `ABSENT`, and its logits are not read.
        threads: most threads.

    Returns:
        None if the logits are not float32, or if a token depends on how torch rounds.
    """
    if logits_BRV.dtype != torch.float32:
        return None
    (B, R, V), positions_BR = logits_BRV.shape, positions_BR.contiguous()
    assert len(samplings) == B and positions_BR.shape == (B, R) and V
    logits_BRV = logits_BRV if logits_BRV.stride(2) == 1 else logits_BRV.contiguous()
    choices = (_Choice * B)(*(_choice(sampling, V) for sampling in samplings))
    tokens_BR = torch.empty(B, R, dtype=torch.long, device="cpu")
    is_undecided = library().draw_tokens(
        logits_BRV.data_ptr(), *logits_BRV.stride()[:2], V, ctypes.addressof(choices), positions_BR.data_ptr(), B, R,
        tokens_BR.data_ptr(), threads,
    )  # fmt: skip
    return None if is_undecided else tokens_BR


def confidence(logits_BRV: Tensor, samplings: Sequence[Sampling], *, threads: int) -> Tensor | None:
    """The largest probability `[B, R]` at each position, in float64; NaN where logits are or the largest is infinite.

    Arguments as in `draw`; filters are not applied, and greedy rows have the temperature 1. None if the logits are not
    float32.
    """
    if logits_BRV.dtype != torch.float32:
        return None
    B, R, V = logits_BRV.shape
    logits_BRV = logits_BRV if logits_BRV.stride(2) == 1 else logits_BRV.contiguous()
    temperatures = (ctypes.c_float * B)(*(each.temperature or 1.0 for each in samplings))
    largest_BR = torch.empty(B, R, dtype=torch.float64, device="cpu")
    library().largest_probabilities(
        logits_BRV.data_ptr(), *logits_BRV.stride()[:2], V, ctypes.addressof(temperatures), B, R, largest_BR.data_ptr(),
        threads,
    )  # fmt: skip
    return largest_BR


@dataclass(frozen=True, kw_only=True)
class CpuSampling:
    """See `sampling.faster.Faster`."""

    threads: int

    def draw(self, logits_BRV: Tensor, samplings: Sequence[Sampling], positions_BR: Tensor) -> Tensor | None:
        """See `draw`."""
        return draw(logits_BRV, samplings, positions_BR, threads=self.threads)

    def confidence(self, logits_BRV: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
        """See `confidence`."""
        return confidence(logits_BRV, samplings, threads=self.threads)


def likeliest(logits_BRV: Tensor, read_BR: Tensor, count: int, *, threads: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens `[B, R, C]` of each position, the best first, and their logits; of equal ones the first id.

    `ABSENT` with -inf after the last token whose logit is above -inf, and where logits are NaN.

    Args:
        logits_BRV: float32, on the CPU.
        read_BR: the token before each position; where it is `ABSENT`, so are the likeliest ones.
        count: C, at least 1.
        threads: most threads.
    """
    (B, R, V), C, read_BR = logits_BRV.shape, count, read_BR.contiguous()
    assert read_BR.shape == (B, R) and read_BR.dtype == torch.long
    logits_BRV = logits_BRV if logits_BRV.stride(2) == 1 else logits_BRV.contiguous()
    tokens_BRC = torch.empty(B, R, C, dtype=torch.long, device="cpu")
    best_BRC = torch.empty(B, R, C, dtype=torch.float32, device="cpu")
    library().likeliest_tokens(
        logits_BRV.data_ptr(), *logits_BRV.stride()[:2], V, read_BR.data_ptr(), B, R, C, tokens_BRC.data_ptr(),
        best_BRC.data_ptr(), threads,
    )  # fmt: skip
    return tokens_BRC, best_BRC


def _choice(sampling: Sampling, vocabulary: int) -> _Choice:
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    top_k = min(sampling.top_k, vocabulary)  # it may exceed 64 bits
    return _Choice(sampling.seed, top_k, sampling.top_p, sampling.temperature, least)

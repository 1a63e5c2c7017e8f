"""Random numbers that belong to a place and not to a moment: functions of (seed, position, token id) alone.

Shape letters: B rows of a batch, N positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea & Flood 2014): stream increment and the two multipliers of its finalizer,
# written as signed 64-bit numbers because torch has no unsigned arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
SPARSE = 1 / 16
"""Up to which share of all tokens noise is computed one by one; each takes several times as long then."""


def gumbel_noise(seed: int | Tensor, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[B, N, V]` in float64, a pure function of (seed, position, token id).

    Args:
        seed: one for all rows, or `[B]` of int64.
        positions_BN: `[B, N]`.
        vocab_size: V.
    """
    return _gumbel(_uniform(seed, positions_BN, vocab_size))


def _gumbel(uniform: Tensor) -> Tensor:
    return -(-uniform.log()).log()


def uniform_numbers(seed: int | Tensor, positions_BN: Tensor) -> Tensor:
    """Numbers `[B, N]` in float64, uniform between 0 and 1, a pure function of (seed, position)."""
    return _uniform(seed, positions_BN, 1)[..., 0]


def seed_of(seed: int | Tensor, purpose: int) -> Tensor:
    """Another seed, for random numbers that must have nothing to do with those of `seed`.

    Args:
        seed: one, or `[B]` of int64.
        purpose: a number above 0; each gives another seed.
    """
    return _mix(torch.as_tensor(seed) ^ _mix(torch.as_tensor(purpose) * _GOLDEN))


def with_noise(scores_BNV: Tensor, seed: int | Tensor, positions_BN: Tensor) -> Tensor:
    """Scores plus Gumbel noise `[B, N, V]`, in float64.

    What is -inf stays so whatever its noise. Where that is nearly everything, behind top-k or top-p, only the
    noise of the rest is computed: of a large vocabulary it would take a CPU longer than many a model's pass.

    Args:
        scores_BNV: `[B, N, V]` of any float type.
        seed: one for all rows, or `[B]` of int64.
        positions_BN: `[B, N]`.
    """
    B, N, V = scores_BNV.shape
    is_open_BNV = scores_BNV > -torch.inf
    if int(is_open_BNV.sum()) > SPARSE * B * N * V:
        return scores_BNV + gumbel_noise(seed, positions_BN, V)
    rows, places, ids = is_open_BNV.nonzero(as_tuple=True)
    seeds_B = torch.as_tensor(seed, device=positions_BN.device).expand(B)
    noise = _gumbel(_numbers(_start(seeds_B[rows], positions_BN[rows, places]), ids))
    return scores_BNV.double().index_put((rows, places, ids), noise, accumulate=True)


def _uniform(seed: int | Tensor, positions_BN: Tensor, count: int) -> Tensor:
    """`[B, N, count]`, the same on every device and in every batch: number v of a position is the v-th of
    a SplitMix64 stream whose start is hashed from seed and position."""
    seeds = torch.as_tensor(seed, device=positions_BN.device)
    start = _start(seeds[:, None] if seeds.ndim else seeds, positions_BN)
    return _numbers(start[..., None], torch.arange(count, device=positions_BN.device))


def _start(seeds: Tensor, positions: Tensor) -> Tensor:
    """Where a position's stream begins."""
    return _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)


def _numbers(start: Tensor, index: Tensor) -> Tensor:
    """Numbers of streams by their index, uniform between 0 and 1, in float64."""
    bits = _mix(start + (index + 1) * _GOLDEN)
    # 52 bits and not 53: the half must fit too, or the largest number would round to 1 and its noise be infinite.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64 words; overflow wraps around."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

"""Counter-based random numbers: pure functions of (seed, position, token id).

Shape letters: B rows of a batch, N positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# SplitMix64 (Steele, Lea & Flood 2014): stream increment and the two multipliers of its finalizer,
# written as signed 64-bit numbers because torch has no unsigned arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_WORD = 2**64 - 1
MOST_KEPT_BYTES = 2**26
"""Size of a noise cache on a CPU: a round needs the noise of most positions twice, to draft and to verify."""
FEWEST_KEPT = 1024
"""Smallest vocabulary whose noise is cached, row by row."""
SPARSE = 1 / 16
"""Largest share of tokens for which noise is computed one by one; each takes several times as long then."""

FEW_NUMBERS = 64
"""Most uniform numbers that are computed one by one: an operation of torch takes longer than several numbers."""


def gumbel_noise(seed: int | Tensor, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[B, N, V]` in float64, a pure function of (seed, position, token id).

    `seed` is one for all rows, or int64 `[B]`.
    """
    if positions_BN.device.type != "cpu" or vocab_size < FEWEST_KEPT or not positions_BN.numel():
        return _gumbel(_uniform(seed, positions_BN, vocab_size))
    seeds = torch.as_tensor(seed)
    seeds_BN = (seeds[:, None] if seeds.ndim else seeds).expand(positions_BN.shape)
    return _kept(_rows(vocab_size), seeds_BN, positions_BN)


RowNoise = Callable[[int, int], Tensor]
"""The noise of ids, from a seed and a position."""


class PositionNoise(NamedTuple):
    """The noise of positions `[B, N]`, of which only some is computed.

    Args:
        seeds: `[B]`.
    """

    seeds: Tensor
    positions: Tensor
    vocab_size: int

    @property
    def starts(self) -> Tensor:
        """`[B, N]` words at which the random numbers of the positions begin."""
        return _start(self.seeds[:, None], self.positions)

    def of(self, ids: Tensor | None) -> Tensor:
        """`gumbel_noise` `[B, N, V]`; or that of token ids `[B, N, C]`, but for the rounding of its logarithms."""
        if ids is None:
            return gumbel_noise(self.seeds, self.positions, self.vocab_size)
        return _gumbel(_numbers(self.starts[..., None], ids.clamp(min=0)))

    def kept(self, row_of: RowNoise) -> Tensor:
        """`[B, N, U]` by rows, which may be kept from earlier rounds."""
        return _kept(row_of, self.seeds[:, None].expand(self.positions.shape), self.positions)


def _kept(row_of: RowNoise, seeds_BN: Tensor, positions_BN: Tensor) -> Tensor:
    rows = [row_of(*key) for key in zip(seeds_BN.flatten().tolist(), positions_BN.flatten().tolist(), strict=True)]
    return torch.stack(rows).view(*positions_BN.shape, -1)


@lru_cache(maxsize=8)
def _rows(vocab_size: int) -> RowNoise:
    return rows_of(np.arange(vocab_size))


def rows_of(ids: np.ndarray[tuple[int], np.dtype[Any]]) -> RowNoise:
    """A function for the noise `[U]` of ids at a seed and a position on a CPU, which caches the last rows.

    It uses NumPy, which has unsigned words: torch takes three times as long.
    """
    steps = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN & _WORD)

    @lru_cache(maxsize=max(MOST_KEPT_BYTES // (8 * len(steps)), 1))
    def row(seed: int, position: int) -> Tensor:
        start = _mixed_word(_mixed_word(seed + _GOLDEN & _WORD) + (position + 1) * _GOLDEN & _WORD)
        bits = _mixed_words(steps + np.uint64(start))
        return _gumbel(torch.from_numpy(((bits >> np.uint64(12)) + 0.5) * 2.0**-52))

    return row


def _gumbel(uniform: Tensor) -> Tensor:
    """-log(-log(u)), in place."""
    return uniform.log_().neg_().log_().neg_()


def uniform_numbers(seed: int | Tensor, positions_BN: Tensor) -> Tensor:
    """Uniform numbers `[B, N]` in (0, 1), in float64, a pure function of (seed, position)."""
    if positions_BN.device.type != "cpu" or positions_BN.numel() > FEW_NUMBERS:
        return _uniform(seed, positions_BN, 1)[..., 0]
    seeds = torch.as_tensor(seed).expand(len(positions_BN)).tolist()
    rows = [
        [_uniform_number(mixed, position) for position in positions]
        for mixed, positions in zip(
            (_mixed_word(each + _GOLDEN & _WORD) for each in seeds), positions_BN.tolist(), strict=True
        )
    ]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").view(positions_BN.shape)


def _uniform_number(mixed_seed: int, position: int) -> float:
    start = _mixed_word(mixed_seed + (position + 1) * _GOLDEN & _WORD)
    return ((_mixed_word(start + _GOLDEN & _WORD) >> 12) + 0.5) * 2.0**-52


def few_gumbel(seed: int, position: int, ids: Sequence[int]) -> list[float]:
    """`gumbel_noise` of a few tokens at a position, but for the rounding of its logarithms."""
    start = _mixed_word(_mixed_word(seed + _GOLDEN & _WORD) + (position + 1) * _GOLDEN & _WORD)
    bits = (_mixed_word(start + (token + 1) * _GOLDEN & _WORD) >> 12 for token in ids)
    return [-math.log(-math.log((each + 0.5) * 2.0**-52)) for each in bits]


def seed_of(seed: int | Tensor, purpose: int) -> Tensor:
    """A seed for random numbers that are independent of those of `seed`; another one for each `purpose` above 0."""
    return _mix(torch.as_tensor(seed) ^ _mix(torch.as_tensor(purpose) * _GOLDEN))


def with_noise(scores_BNV: Tensor, seed: int | Tensor, positions_BN: Tensor) -> Tensor:
    """Scores plus Gumbel noise `[B, N, V]`, in float64; `seed` as in `gumbel_noise`.

    Scores of -inf need no noise. If nearly all are, after top-k or top-p, only the noise of the rest is computed: for a
    large vocabulary all of it would take a CPU longer than the pass of many models.
    """
    B, N, V = scores_BNV.shape
    is_open_BNV = scores_BNV > -torch.inf
    if int(is_open_BNV.sum()) > SPARSE * B * N * V:
        return scores_BNV + gumbel_noise(seed, positions_BN, V)
    rows, columns, ids = is_open_BNV.nonzero(as_tuple=True)
    seeds_B = torch.as_tensor(seed, device=positions_BN.device).expand(B)
    noise = _gumbel(_numbers(_start(seeds_B[rows], positions_BN[rows, columns]), ids))
    return scores_BNV.double().index_put((rows, columns, ids), noise, accumulate=True)


def _uniform(seed: int | Tensor, positions_BN: Tensor, count: int) -> Tensor:
    """`[B, N, count]`, the same on every device and in every batch: number v of a position is the v-th of a SplitMix64
    stream whose start is hashed from seed and position."""
    seeds = torch.as_tensor(seed, device=positions_BN.device)
    start = _start(seeds[:, None] if seeds.ndim else seeds, positions_BN)
    return _numbers(start[..., None], torch.arange(count, device=positions_BN.device))


def _start(seeds: Tensor, positions: Tensor) -> Tensor:
    return _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)


def _numbers(start: Tensor, index: Tensor) -> Tensor:
    """Uniform numbers of streams by index, in float64."""
    bits = _mix(start + (index + 1) * _GOLDEN)
    # 52 bits and not 53: 0.5 must fit too, or the largest number would round to 1, with infinite noise.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64 words; overflow wraps around."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _mixed_word(z: int) -> int:
    """`_mix` of one unsigned word."""
    z = (z ^ z >> 30) * _MIX_1 & _WORD
    z = (z ^ z >> 27) * _MIX_2 & _WORD
    return z ^ z >> 31


def _mixed_words(z: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """`_mix` of unsigned words, in place."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor & _WORD)
    z ^= z >> np.uint64(31)
    return z


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)

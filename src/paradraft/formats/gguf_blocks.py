"""Unpacks GGUF's quantized weight types into integers, scales and offsets.

A weight is `scale * value`, or `scale * value + offset`, with one scale for a group of 16 or 32 weights of a row, as in
`paradraft.models.quantized`. Nothing is rounded: a group's scale that is stored as a product of two numbers, of 11 and
of at most 8 bits, is exact in float32.

Shape letters: N rows, C blocks of a row, I weights of a block, G groups of a row, K weights of a row, S superblocks of
256 weights in a row.

Source: ggml's `ggml-common.h` and `ggml-quants.c`; the tests compare with `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Type names by ggml's type id."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """Scales or offsets of groups: each is the superblock's factor times the group's int8 number.

    Args:
        factors: `[N, S]` float16.
        numbers: `[N, G]` int8.
    """

    factors: Tensor
    numbers: Tensor

    def float(self) -> Tensor:
        """The products `[N, G]`, exact in float32."""
        return (self.factors.float()[:, :, None] * self.numbers.unflatten(1, (self.factors.shape[1], -1))).flatten(1)

    @property
    def tensors(self) -> list[Tensor]:
        """Factors and numbers."""
        return [self.factors, self.numbers]

    def __getitem__(self, rows: Tensor | slice) -> Products:
        return Products(factors=self.factors[rows], numbers=self.numbers[rows])


Numbers = Tensor | Products


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Quantized weights, as `QuantizedTensor` takes them.

    Args:
        values: `[N, K]` int8, in [0, 2**bits) with offsets, else in [-2**(bits-1), 2**(bits-1)).
        scales: `[N, G]` float16 or float32, or products.
        offsets: likewise, or None.
        bits: 4, 5, 6 or 8.
        group: weights per group.
    """

    values: Tensor
    scales: Numbers
    offsets: Numbers | None
    bits: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A weight type.

    Args:
        unpack: turns bytes `[N, C, size_bytes]` into `Blocks`; None for floating-point types.
        dtype: of a floating-point type.
    """

    size_bytes: int
    weights: int
    unpack: Callable[[Tensor], Blocks] | None = None
    dtype: torch.dtype | None = None


def _half(raw_NCX: Tensor, start: int) -> Tensor:
    """The float16 number `[N, C]` at byte `start` of each block."""
    return raw_NCX[:, :, start : start + 2].contiguous().view(torch.float16)[:, :, 0]


def _nibbles(raw_NCX: Tensor) -> Tensor:
    """`[N, C, 2X]` the low nibbles of the bytes, then the high nibbles."""
    bytes_NCX = np.ascontiguousarray(raw_NCX.numpy())  # NumPy takes a third of torch's time
    halves_NC2X = np.empty((*bytes_NCX.shape[:2], 2, bytes_NCX.shape[2]), dtype=np.uint8)
    np.bitwise_and(bytes_NCX, 15, out=halves_NC2X[:, :, 0])
    np.right_shift(bytes_NCX, 4, out=halves_NC2X[:, :, 1])
    return torch.from_numpy(halves_NC2X).flatten(2)


def _less(values: Tensor, middle: int) -> Tensor:
    """Subtracts `middle` from bytes, as int8, in place."""
    return values.view(torch.int8).sub_(middle)


def _fifth_bits(raw_NC4: Tensor) -> Tensor:
    """`[N, C, 32]` the bits of 4 bytes, each as 0 or 16."""
    bits_NCX = np.unpackbits(np.ascontiguousarray(raw_NC4.numpy()), axis=2, bitorder="little")
    return torch.from_numpy(bits_NCX << 4)


def _simple(values_NCI: Tensor, scales_NC: Tensor, least_NC: Tensor | None, bits: int) -> Blocks:
    """One group per block."""
    return Blocks(
        values=values_NCI.view(torch.int8).flatten(1), scales=scales_NC, offsets=least_NC, bits=bits, group=32
    )


def _q4_0(raw: Tensor) -> Blocks:
    return _simple(_less(_nibbles(raw[:, :, 2:]), 8), _half(raw, 0), None, 4)


def _q4_1(raw: Tensor) -> Blocks:
    return _simple(_nibbles(raw[:, :, 4:]), _half(raw, 0), _half(raw, 2), 4)


def _q5_0(raw: Tensor) -> Blocks:
    values = _nibbles(raw[:, :, 6:]) | _fifth_bits(raw[:, :, 2:6])
    return _simple(_less(values, 16), _half(raw, 0), None, 5)


def _q5_1(raw: Tensor) -> Blocks:
    return _simple(_nibbles(raw[:, :, 8:]) | _fifth_bits(raw[:, :, 4:8]), _half(raw, 0), _half(raw, 2), 5)


def _q8_0(raw: Tensor) -> Blocks:
    return _simple(raw[:, :, 2:].contiguous(), _half(raw, 0), None, 8)


def _six_bit_scales(raw_NCX: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima `[N, C, 8]`, 0 to 63, that Q4_K and Q5_K pack for 8 groups into 12 bytes."""
    low, least, high = raw_NCX[:, :, :4], raw_NCX[:, :, 4:8], raw_NCX[:, :, 8:]
    scales = torch.cat([low & 63, (high & 15) | (low >> 2 & 48)], dim=2)
    minima = torch.cat([least & 63, (high >> 4) | (least >> 2 & 48)], dim=2)
    return scales, minima


def _with_minima(raw: Tensor, values_NCI: Tensor, bits: int) -> Blocks:
    scales, minima = (numbers.view(torch.int8).flatten(1) for numbers in _six_bit_scales(raw[:, :, 4:16]))
    return Blocks(
        values=values_NCI.view(torch.int8).flatten(1), scales=Products(factors=_half(raw, 0), numbers=scales),
        offsets=Products(factors=-_half(raw, 2), numbers=minima), bits=bits, group=32,
    )  # fmt: skip


def _pairs_of_32(raw_NCX: Tensor) -> Tensor:
    """`[N, C, 2X]` nibbles: for each 32 bytes the low ones, then the high ones."""
    return _nibbles(raw_NCX.unflatten(2, (-1, 32)).flatten(0, 1)).view(*raw_NCX.shape[:2], -1)


def _q4_k(raw: Tensor) -> Blocks:
    return _with_minima(raw, _pairs_of_32(raw[:, :, 16:]), 4)


def _q5_k(raw: Tensor) -> Blocks:
    bytes_NC1X = np.ascontiguousarray(raw[:, :, None, 16:48].numpy())
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # bit i of a byte belongs to the i-th group
    fifth = torch.from_numpy((bytes_NC1X >> shifts & 1) << 4).flatten(2)
    return _with_minima(raw, _pairs_of_32(raw[:, :, 48:]).bitwise_or_(fifth), 5)


def _q6_k(raw: Tensor) -> Blocks:
    low = _nibbles(raw[:, :, :128].unflatten(2, (2, 64)).flatten(0, 1)).view(*raw.shape[:2], 256)
    bytes_NC21X = np.ascontiguousarray(raw[:, :, 128:192].unflatten(2, (2, 1, 32)).numpy())
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = torch.from_numpy((bytes_NC21X >> shifts & 3) << 4).flatten(2)
    scales = Products(factors=_half(raw, 208), numbers=raw[:, :, 192:208].contiguous().view(torch.int8).flatten(1))
    return Blocks(
        values=_less(low.bitwise_or_(high), 32).flatten(1), scales=scales, offsets=None, bits=6, group=16
    )  # fmt: skip


KINDS = {
    0: Kind(size_bytes=4, weights=1, dtype=torch.float32),
    1: Kind(size_bytes=2, weights=1, dtype=torch.float16),
    30: Kind(size_bytes=2, weights=1, dtype=torch.bfloat16),
    8: Kind(size_bytes=34, weights=32, unpack=_q8_0),
    2: Kind(size_bytes=18, weights=32, unpack=_q4_0),
    3: Kind(size_bytes=20, weights=32, unpack=_q4_1),
    6: Kind(size_bytes=22, weights=32, unpack=_q5_0),
    7: Kind(size_bytes=24, weights=32, unpack=_q5_1),
    12: Kind(size_bytes=144, weights=256, unpack=_q4_k),
    13: Kind(size_bytes=176, weights=256, unpack=_q5_k),
    14: Kind(size_bytes=210, weights=256, unpack=_q6_k),
}
"""The supported types by ggml's type id."""


def row_bytes(kind: int, weights: int) -> int:
    """Bytes of a row of `weights` weights; `kind` is in `KINDS`.

    >>> row_bytes(8, 64)
    68
    """
    return weights // KINDS[kind].weights * KINDS[kind].size_bytes


def unpacked(kind: int, raw: Tensor) -> Blocks | Tensor:
    """Unpacks bytes `[N, bytes of a row]` of a type in `KINDS`; floating-point types give the tensor `[N, K]`."""
    stored = KINDS[kind]
    if stored.unpack is None:
        assert stored.dtype is not None
        return raw.view(stored.dtype)
    return stored.unpack(raw.unflatten(1, (-1, stored.size_bytes)))

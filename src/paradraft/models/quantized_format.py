"""The storage formats of quantized weights that have kernels."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from paradraft.formats.gguf_blocks import Numbers, Products

BLOCK = 32
"""Inputs of a token that share a scale."""
SUPERBLOCK = 256
"""Inputs that share the factors of `Products`."""


class NumberKind(IntEnum):
    """Storage of scales or offsets: none, float32, float16, or `Products`."""

    NONE = 0
    FLOATS = 1
    HALVES = 2
    PRODUCTS = 3

    @staticmethod
    def of(numbers: Numbers | None) -> NumberKind:
        """The kind of scales or offsets."""
        if numbers is None:
            return NumberKind.NONE
        if isinstance(numbers, Products):
            return NumberKind.PRODUCTS
        return NumberKind.HALVES if numbers.dtype == torch.float16 else NumberKind.FLOATS

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers, or of the factors of products."""
        return torch.float32 if self is NumberKind.FLOATS else torch.float16


class Format(NamedTuple):
    """The storage format of quantized weights.

    Args:
        bits: 4, 5, 6 or 8.
        group: inputs that share a scale; 0 if an output has one scale and no offset.
        scales: their kind.
        offsets: likewise.
    """

    bits: int
    group: int
    scales: NumberKind
    offsets: NumberKind

    @property
    def is_known(self) -> bool:
        """Whether there is a kernel for it."""
        is_block = self.group <= BLOCK or NumberKind.PRODUCTS not in (self.scales, self.offsets)
        return is_block and self.bits in FORMATS[min(self.group, BLOCK)].get((self.scales, self.offsets), ())

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of weights, scales and offsets."""
        groups = -(-inputs // self.group) if self.group else 1
        total = inputs * self.bits / 8
        for kind in (self.scales, self.offsets):
            if kind is NumberKind.PRODUCTS:
                total += inputs // SUPERBLOCK * 2 + groups * (1 if self.offsets is NumberKind.NONE else 6 / 8)
            elif kind is not NumberKind.NONE:
                total += groups * kind.dtype.itemsize
        return round(outputs * total)


_N, _F, _H, _P = NumberKind
FORMATS: dict[int, dict[tuple[NumberKind, NumberKind], tuple[int, ...]]] = {
    0: {(_F, _N): (4, 8), (_H, _N): (4, 8)},
    16: {(_P, _N): (6,)},
    32: {(_H, _N): (4, 5, 8), (_H, _H): (4, 5), (_H, _F): (4,), (_F, _N): (4,), (_F, _F): (4,), (_P, _P): (4, 5)},
}
"""Bits with a kernel, by group size (32: and its multiples) and kinds of scales and offsets."""

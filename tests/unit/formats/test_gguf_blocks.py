"""Blocks of few bits against `gguf.quants.dequantize`, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from paradraft.formats.gguf_blocks import KINDS, NAMES, Blocks, row_bytes, unpacked
from paradraft.sources.stored_weights import quantized

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
"""Where a block has float16 numbers."""


def random_blocks(kind: str, rows: int = 7, blocks: int = 3) -> np.ndarray:
    """Any bytes, but for scales, which are numbers of all sizes."""
    stored = KINDS[next(number for number, name in NAMES.items() if name == kind)]
    chooser = np.random.default_rng(rows)
    raw = chooser.integers(0, 256, (rows, blocks, stored.size_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        numbers = chooser.normal(size=(rows, blocks, 1)) * 2.0 ** chooser.integers(-24, 8, (rows, blocks, 1))
        raw[:, :, at : at + 2] = numbers.astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", HALVES)
def test_weights_are_those_of_the_format(kind: str) -> None:
    """Guards every bit of every type: nibbles, fifth and sixth bits, scales of six bits, minima, signs."""
    raw, number = random_blocks(kind), gguf.GGMLQuantizationType[kind].value
    blocks = unpacked(number, torch.from_numpy(raw))
    assert isinstance(blocks, Blocks)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(quantized(blocks, torch.float32).dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_numbers_stay_as_they_are(kind: str) -> None:
    numbers = torch.randn(3, 8)
    raw = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType[kind])
    found = unpacked(gguf.GGMLQuantizationType[kind].value, torch.from_numpy(raw.view(np.uint8).reshape(3, -1)))
    assert isinstance(found, torch.Tensor) and found.dtype == getattr(
        torch, {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    )
    assert torch.equal(found, numbers.to(found.dtype))


def test_types_and_sizes_are_those_of_the_package() -> None:
    """Guards the numbers that stand in files, and the sizes by which tensors are found in them."""
    assert {
        number: kind.name for number, kind in ((kind.value, kind) for kind in gguf.GGMLQuantizationType)
    }.items() >= {number: NAMES[number] for number in KINDS}.items()
    for number, kind in KINDS.items():
        assert (kind.weights, kind.size_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        assert row_bytes(number, 512) == 512 * kind.size_bytes // kind.weights


def test_a_wrong_bit_is_noticed() -> None:
    """The control: another value of one weight, or another scale of one group, is not equal."""
    raw = random_blocks("Q4_K")
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    for at in (0, 2, 5, 9, 14, 16, 143):
        other = raw.copy()
        other[0, at] ^= 1
        blocks = unpacked(12, torch.from_numpy(other))
        assert isinstance(blocks, Blocks)
        assert not np.array_equal(quantized(blocks, torch.float32).dequantize().numpy(), expected)

"""Weights of few bits: how they are rounded, and products with them."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paradraft.formats.gguf_blocks import Products
from paradraft.models import quantized_format
from paradraft.models.forward.cpu.matrix import PackedMatrix
from paradraft.models.quantization import (
    round_linears,
    rounded,
    rounded_to_4_bits,
    rounded_to_8_bits,
    stored_bytes,
    stored_parts,
)
from paradraft.models.quantized import QuantizedTensor, _fused, plain_product, rounded_inputs
from paradraft.models.quantized_format import BLOCK, Format, NumberKind
from paradraft.models.runtime import Runtime

SHAPES = [(70, 96), (5, 32), (3, 100), (130, 33), (65, 320), (1, 7)]
FORMATS = [
    Format(bits, group, *kinds)
    for least, known in quantized_format.FORMATS.items()
    for group in ((least,) if least < 32 else (32, 64))
    for kinds, all_bits in known.items()
    for bits in all_bits
    if group == 32 or NumberKind.PRODUCTS not in kinds or group == 16
]
"""All that there are kernels for."""
ROWS = [1, 2, 3, 4, 5, 6, 7, 9, 13, 26, 50]
"""Of products: all numbers that kernels have code for, and those that are cut into some of these."""


def named(format: Format) -> str:
    return "-".join([str(format.bits), str(format.group), format.scales.name.lower(), format.offsets.name.lower()])


def shapes_of(format: Format) -> list[tuple[int, int]]:
    """Shapes with parts of panels, of groups and of blocks."""
    return [(70, 512), (3, 256)] if format.scales is NumberKind.PRODUCTS else SHAPES


def random_weight(format: Format, shape: tuple[int, int]) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(format.bits + format.group)
    has_offsets = format.offsets is not NumberKind.NONE
    half = 2 ** (format.bits - 1)
    lowest, highest = (0, 2 * half - 1) if has_offsets else (-half, half - 1)
    group = format.group or shape[1]

    def numbers(kind: NumberKind, size: float) -> Tensor | Products | None:
        groups = shape[0], math.ceil(shape[1] / group)
        if kind is NumberKind.NONE:
            return None
        if kind is not NumberKind.PRODUCTS:
            return (torch.randn(groups, generator=generator) * size).to(kind.dtype)
        least, most = (0, 63) if has_offsets else (-128, 127)
        factors = torch.randn(shape[0], shape[1] // 256, generator=generator) * size / most
        whole = torch.randint(least, most + 1, groups, dtype=torch.int8, generator=generator)
        return Products(factors=factors.half(), numbers=whole)

    scales = numbers(format.scales, 0.01)
    assert scales is not None
    values = torch.randint(lowest, highest + 1, shape, dtype=torch.int8, generator=generator)
    values[0], values[-1] = highest, lowest
    return QuantizedTensor(values, scales, numbers(format.offsets, 0.1), bits=format.bits, group=group)


def random_inputs(rows: int, width: int) -> Tensor:
    """Rows of very different sizes, one of them nothing at all."""
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    inputs[rows // 2, :20] = 0.0
    inputs[-1] *= rows != 4
    return inputs


def product(matrix: PackedMatrix, inputs: Tensor, threads: int = 1) -> Tensor:
    outputs = torch.empty(len(inputs), matrix.matrix.outputs)
    assert matrix.multiply(inputs, outputs, threads)
    return outputs


def assert_kernels_follow(weight: QuantizedTensor) -> None:
    """The kernels give the bits that torch gives, and what they have stored is what they were given.

    Inputs of one size, all positive or negative, give the largest sums, which must fit into the kernels' numbers.
    """
    plain = copy.deepcopy(weight)
    packed = PackedMatrix([weight])
    largest = torch.tensor([[1.0], [-1.0]]).expand(2, weight.shape[1]).contiguous()
    for inputs in (*(random_inputs(rows, weight.shape[1]) for rows in ROWS), largest):
        assert torch.equal(product(packed, inputs, 1 + len(inputs) % 2), plain_product(inputs, plain)), len(inputs)
    for before, after in zip(stored_parts(plain), stored_parts(weight), strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)
    assert torch.equal(plain.dequantize(), weight.dequantize())
    some = torch.tensor([len(plain) - 1, 0])
    assert torch.equal(plain.rows(some), weight.rows(some)) and torch.equal(weight.rows(some), plain.dequantize()[some])


@pytest.mark.parametrize("format", FORMATS, ids=named)
def test_kernels_give_the_bits_of_the_definition(format: Format) -> None:
    """Guards the promise that the text is the same on every CPU and in every batch, and stored weights against a place
    of their own that differs from where they are read."""
    for shape in shapes_of(format):
        assert_kernels_follow(random_weight(format, shape))


def test_a_product_is_what_its_definition_says() -> None:
    """Guards the oracle itself: a double loop over outputs and inputs, in Python's numbers."""
    weight = random_weight(Format(4, 32, NumberKind.HALVES, NumberKind.FLOATS), (3, 70))
    inputs = random_inputs(2, 70)
    values, scales, offsets = weight.parts
    assert isinstance(scales, Tensor) and isinstance(offsets, Tensor)
    blocks, factors = rounded_inputs(inputs)
    for row in range(2):
        for output in range(3):
            total = 0.0
            for k in range(70):
                number = float(values[output, k]) * float(scales[output, k // 32]) + float(offsets[output, k // 32])
                total += number * float(blocks[row, k // BLOCK, k % BLOCK]) * float(factors[row, k // BLOCK])
            assert float(plain_product(inputs, weight)[row, output]) == pytest.approx(total, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("size", [1.0, 2.0**-126])
def test_sums_are_rounded_once(size: float) -> None:
    """Guards the last bit: float64 rounds the sum to the middle of two float32 numbers, from which the way to the
    nearer one cannot be seen; of small numbers too, whose middle has other bits."""
    little = 2.0**-15
    left = torch.tensor([1 + little, 1 + little, -1 - little]) * 2.0**-24
    total = torch.tensor([1 + 2.0**-23, 1.0, 1 + 2.0**-23]) * size
    found = _fused(left, torch.tensor((1 - little) * size), total)
    for x, y, number in zip(left.tolist(), total.tolist(), found, strict=True):
        exact = Fraction(x) * Fraction((1 - little) * size) + Fraction(y)
        for way in (math.inf, -math.inf):
            other = float(number.nextafter(torch.tensor(way)))
            assert abs(Fraction(float(number)) - exact) < abs(Fraction(other) - exact)


def test_inputs_are_rounded_block_by_block() -> None:
    """Guards small numbers beside large ones: an outlier costs its own block its precision, and no other."""
    inputs = torch.zeros(1, 70)
    inputs[0, :3] = torch.tensor([1000.0, 3.0, -1000.0])
    inputs[0, 64:] = torch.tensor([0.5, -0.25, 0.125, 0.0, 0.0, 0.0])
    blocks, scales = rounded_inputs(inputs)
    assert blocks[0, 0, :3].tolist() == [127, 0, -127]
    assert blocks[0, 2, :4].tolist() == [127, -64, 32, 0]
    assert scales[0].tolist() == pytest.approx([1000 / 127, 0.0, 0.5 / 127])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_stay_so(wrong: float) -> None:
    """Guards the message of a model whose states overflow: rounded to 8 bits, they would look like others."""
    inputs = torch.randn(2, 64)
    inputs[1, 40] = wrong
    weight = random_weight(Format(8, 32, NumberKind.HALVES, NumberKind.NONE), (5, 64))
    plain = plain_product(inputs, weight)
    assert plain[0].isfinite().all() and plain[1].isnan().all()
    packed = product(PackedMatrix([weight]), inputs)
    assert torch.equal(packed[0], plain[0]) and packed[1].isnan().all()


def test_4_bits_are_rounded_better_than_to_the_largest() -> None:
    """Guards the search for scales: Q4_0 takes a quarter more error."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    ours = (rounded_to_4_bits(weight).dequantize() - weight).square().mean()
    theirs = (plain_q4_0(weight) - weight).square().mean()
    assert ours < 0.9 * theirs


def like_real_weights(seed: int, *, outliers: int) -> torch.Tensor:
    """`[96, 200]` with heavy tails, outputs of other sizes, and channels ten times as large as others."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(96, 200, generator=generator)
    tails = normal / torch.rand(96, 200, generator=generator).sqrt().clamp(min=0.05)
    channels = torch.ones(200)
    channels[torch.randperm(200, generator=generator)[:outliers]] = 10
    return 0.02 * tails * channels * torch.logspace(-2, 1, 96)[:, None]


def plain_q4_0(weight: torch.Tensor) -> torch.Tensor:
    """Weights as llama.cpp's Q4_0 has them: the number of the largest size becomes -8."""
    groups = nn.functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    scales = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    values = (groups / scales.where(scales != 0, torch.inf) + 8.5).floor().clamp(0, 15) - 8
    return (values * scales.half()).flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize("outliers", [0, 4])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_group_of_4_bits_is_worse_than_in_q4_0(seed: int, outliers: int) -> None:
    """Guards the search for scales where a few numbers, outputs or channels are far larger than the rest."""
    weight = like_real_weights(seed, outliers=outliers)
    errors = [
        nn.functional.pad((numbers - weight).square(), (0, -200 % 32)).unflatten(1, (-1, 32)).sum(2)
        for numbers in (rounded_to_4_bits(weight).dequantize(), plain_q4_0(weight))
    ]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())
    assert (errors[0] / errors[1]).mean() < 0.95


def attention(keys: int) -> nn.Module:
    """The layers of an attention of 64 numbers, and of the block after it."""
    shapes = {
        "q_proj": (64, 64),
        "k_proj": (keys, 64),
        "v_proj": (keys, 64),
        "o_proj": (64, 64),
        "down_proj": (64, 128),
    }
    return nn.ModuleDict({name: nn.Linear(inputs, outputs) for name, (outputs, inputs) in shapes.items()})


@pytest.mark.parametrize(("keys", "in_8_bits"), [(16, {"k_proj", "v_proj"}), (64, set())])
def test_shared_keys_and_values_keep_8_bits(keys: int, in_8_bits: set[str]) -> None:
    """Guards the cheapest third of what 4 bits cost, and the size of models whose heads share nothing."""
    model = attention(keys)
    expected = {
        name: rounded(layer.weight, 8 if name in in_8_bits else 4).dequantize()
        for name, layer in model.named_children()
    }
    round_linears(model, 4, model)
    for name, layer in model.named_children():
        assert layer.weight.bits == (8 if name in in_8_bits else 4)
        assert torch.equal(layer.weight.dequantize(), expected[name])


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_nothing_stay_so(bits: int) -> None:
    """Guards a division by a scale of 0, in rows that only fill up a vocabulary."""
    weight = torch.zeros(3, 40)
    weight[1, 0] = 1e-30
    assert torch.equal(rounded(weight, bits).dequantize()[[0, 2]], torch.zeros(2, 40))


def test_the_head_keeps_8_bits() -> None:
    """Guards small models, whose heads are a third of them: in 4 bits they say something else."""
    model = nn.ModuleDict({"body": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    round_linears(model, 4, model["head"])
    assert [stored_bytes(model[name].weight) for name in ("body", "head")] == [64 * 32 + 64 * 2 * 2, 64 * 64 + 64 * 4]


def test_an_embedding_reads_its_rows() -> None:
    """Guards embeddings of few bits, which files of llama.cpp have."""
    embedding = nn.Embedding(10, 64)
    weight = rounded_to_8_bits(embedding.weight)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    tokens = torch.tensor([[3, 9], [0, 3]])
    expected = weight.dequantize()[tokens]
    assert torch.equal(embedding(tokens), expected)
    PackedMatrix([rounded_to_8_bits(torch.ones(3, 64)), weight])
    assert torch.equal(embedding(tokens), expected)


def test_rows_of_packed_weights_are_unpacked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafters that embed tokens every round against unpacking a vocabulary each time."""
    weight = rounded_to_4_bits(torch.randn(500, 64))
    expected = weight.dequantize()
    PackedMatrix([weight])
    monkeypatch.setattr(QuantizedTensor, "parts", property(lambda self: pytest.fail("all of them")))
    assert torch.equal(weight.rows(torch.tensor([[7, 499], [7, 0]])), expected[torch.tensor([[7, 499], [7, 0]])])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 7}, "use int8"),
        ({"bits": 6}, "there is no kernel"),
        ({"bits": 8, "offsets": torch.ones(2, 2)}, "there is no kernel"),
        ({"values": torch.zeros(2, 64)}, "use int8"),
        ({"group": 24}, "groups of 24 inputs"),
        ({"group": 16, "scales": torch.ones(2, 4).half()}, "there is no kernel"),
        ({"scales": torch.ones(2, 3)}, r"shape \[2, 3\]: these weights need \[2, 2\]"),
        ({"offsets": torch.ones(1, 2)}, r"shape \[1, 2\]"),
        ({"values": torch.full((2, 64), 9, dtype=torch.int8)}, "values of 4 bits from 9 to 9: use -8 to 7"),
        ({"values": torch.full((2, 64), -1, dtype=torch.int8), "offsets": torch.ones(2, 2)}, "use 0 to 15"),
    ],
)
def test_parts_that_do_not_fit(change: dict[str, object], says: str) -> None:
    """Guards files that are read wrongly, which would give other weights without an error."""
    settings = {"values": torch.zeros(2, 64, dtype=torch.int8), "scales": torch.ones(2, 2), "bits": 4, "group": 32}
    with pytest.raises(ValueError, match=says):
        QuantizedTensor(**(settings | change))  # type: ignore[arg-type]  # that is the test


def test_what_is_not_said_of_few_bits_is_an_error() -> None:
    """Guards against torch's own operations on a tensor that has no numbers."""
    with pytest.raises(NotImplementedError, match="dequantize"):
        rounded_to_8_bits(torch.ones(2, 64)) + 1


def test_4_bits_take_half_of_8(tmp_path: Path) -> None:
    """Guards `int4` on CPUs against 8 bits in disguise."""
    assert Runtime(device="cpu", dtype="int4").computed_in in (torch.bfloat16, torch.float32)
    weight = torch.randn(128, 256)
    packed = {bits: PackedMatrix([rounded(weight, bits)]) for bits in (8, 4)}
    sizes = {bits: matrix.panels.numbers.numel() for bits, matrix in packed.items()}
    assert sizes == {8: 128 * 256, 4: 128 * 128 + 128 * 8 * 2}

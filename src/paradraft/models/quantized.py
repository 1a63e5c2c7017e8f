"""Quantized weights (4 to 8 bits) and products with them: the definition that the CPU kernels follow to the last bit.

A weight is `scale * value`, or `scale * value + offset`; a scale, and an offset if there are any, belong to a group of
inputs of one output (all inputs if there is one group). Activations are quantized too: each token's inputs in blocks of
32, each block to integers from -127 to 127 and a scale. So a product is a sum of integers in each block, which is exact
in any order, and a float32 sum over blocks in their order: the same for a token in every batch and on every CPU.

Shape letters: M tokens, N outputs, K inputs, B blocks of inputs, G groups of inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from paradraft.formats.gguf_blocks import Numbers, Products
from paradraft.models.quantized_format import BLOCK, FORMATS, SUPERBLOCK, Format, NumberKind

GROUP = 32
"""Weights that share a scale when quantized to 4 bits here, as in Q4_0."""
LARGEST = 127
"""Largest 8-bit integer of inputs and weights, and minus the smallest; -128 could overflow a CPU's sums."""
OUTPUTS_AT_ONCE = 4096
"""Outputs that torch dequantizes at a time, to save memory."""
Parts = tuple[Tensor, Numbers, Numbers | None]


@runtime_checkable
class HasRows(Protocol):
    """A source of weights that can return some outputs alone."""

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights `[U, K]` of these outputs `[U]`, as float32 numbers."""


class QuantizedTensor(Tensor):
    """Quantized weights `[N, K]`, in place of an ordinary tensor in a linear layer or an embedding.

    Args:
        values: `[N, K]` int8; 4 bits are 0 to 15 with offsets, else -8 to 7, and so on.
        scales: `[N, G]` float16, float32 or products; a group has K inputs if G is 1, else `group`.
        offsets: likewise, or None.
        bits: 4, 5, 6 or 8.
        group: inputs of a group, 16 or a multiple of 32; the last may be smaller. K if G is 1.
        dtype: of results.

    Raises:
        ValueError: the parts do not fit each other, or there is no kernel for them.
    """

    bits: int
    group: int
    format: Format

    @staticmethod
    def __new__(  # noqa: D102  # as __init__
        cls,
        values: Tensor,
        scales: Numbers,
        offsets: Numbers | None = None,
        *,
        bits: int,
        group: int,
        dtype: torch.dtype = torch.float32,
    ) -> QuantizedTensor:
        tensor: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device, requires_grad=False
        )
        return tensor

    def __init__(
        self,
        values: Tensor,
        scales: Numbers,
        offsets: Numbers | None = None,
        *,
        bits: int,
        group: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        kinds = NumberKind.of(scales), NumberKind.of(offsets)
        stored_group = group
        if group == values.shape[-1]:
            has_one_scale = bits in FORMATS[0].get(kinds, ())
            stored_group = 0 if has_one_scale else -(-group // BLOCK) * BLOCK
        format = Format(bits, stored_group, *kinds)
        _check(values, scales, offsets, format, group)
        self._hold(format, group, (values, scales, offsets), None)

    def _hold(self, format: Format, group: int, parts: Parts | None, source: Callable[[], Parts] | None) -> None:
        self.format, self.bits, self.group = format, format.bits, group
        self._parts = parts
        self.source = source
        """Returns the parts, if they are not stored here."""
        self.product: Callable[[Tensor], Tensor] | None = None
        """The kernel that computes `[M, N]` of `[M, K]`; None for torch."""

    @classmethod
    def elsewhere(
        cls, source: Callable[[], Parts], shape: Sequence[int], *, format: Format, group: int, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Weights on the CPU whose parts `source` returns: it stores them in another form, or computes them later."""
        tensor: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"), requires_grad=False
        )
        tensor._hold(format, group, None, source)
        return tensor

    @property
    def parts(self) -> Parts:
        """Values, scales, and offsets or None."""
        if self._parts is not None:
            return self._parts
        assert self.source is not None
        return self.source()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights, with scales and offsets."""
        return self.format.stored_bytes(*self.shape)

    def move_to(self, source: Callable[[], Parts]) -> None:
        """Frees the parts, which `source` returns from now on."""
        self._parts, self.source = None, source

    def keep_parts(self) -> None:
        """Stores the parts here, where every product needs them."""
        self._parts, self.source = self.parts, None

    def __repr__(self) -> str:  # type: ignore[override]  # torch passes nothing
        return f"QuantizedTensor({list(self.shape)}, {self.format})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        return QuantizedTensor(*copy.deepcopy(self.parts), bits=self.bits, group=self.group, dtype=self.dtype)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.linear and isinstance(args[1], QuantizedTensor):
            return _linear(*args, **(kwargs or {}))
        if function is functional.embedding and isinstance(args[1], QuantizedTensor):
            return args[1].rows(args[0])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch's own subclasses declare it
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{function} of weights of few bits: `dequantize()` has them as numbers")

    def rows(self, tokens: Tensor) -> Tensor:
        """Embedding lookup: the weights `[…, K]` of outputs `[…]`."""
        if not tokens.numel():
            return torch.empty(*tokens.shape, self.shape[1], dtype=self.dtype, device=self.device)
        outputs_U, inverse = tokens.unique(return_inverse=True)
        if self._parts is None and isinstance(self.source, HasRows):
            return self.source.rows(outputs_U).to(self.dtype)[inverse]
        return self.of_outputs(outputs_U).dequantize()[inverse]

    def of_outputs(self, outputs_U: Tensor) -> QuantizedTensor:
        """The weights of some outputs `[U]` in the same format, whose products are the same to the last bit."""
        values, scales, offsets = self.parts
        outputs_U = outputs_U.to(values.device)
        parts = values[outputs_U], scales[outputs_U], None if offsets is None else offsets[outputs_U]
        return QuantizedTensor(*parts, bits=self.bits, group=self.group, dtype=self.dtype)

    def dequantize(self) -> Tensor:
        """The weights `[N, K]` in the dtype of results."""
        return self._numbers(self.parts)

    def _numbers(self, parts: Parts) -> Tensor:
        return numbers_of(parts, self.group).to(self.dtype)


def numbers_of(parts: Parts, group: int) -> Tensor:
    """Dequantizes weights in groups of `group` inputs to `[N, K]` float32."""
    values, scales, offsets = parts
    numbers = values * _spread(scales.float(), group, values.shape[1])
    if offsets is not None:
        numbers += _spread(offsets.float(), group, values.shape[1])
    return numbers


def _check(values: Tensor, scales: Numbers, offsets: Numbers | None, format: Format, group: int) -> None:
    bits = format.bits
    if bits not in (4, 5, 6, 8) or values.dtype != torch.int8 or values.ndim != 2:
        raise ValueError(
            f"{bits} bits, {values.dtype} values of shape {list(values.shape)}: use int8 [N, K], bits 4, 5, 6 or 8"
        )
    outputs, inputs = values.shape
    if group != inputs and group != BLOCK // 2 and group % BLOCK:
        raise ValueError(f"groups of {group} inputs: use {BLOCK // 2}, a multiple of {BLOCK}, or all {inputs}")
    for part in (scales, offsets):
        for numbers, per in (
            [(part.factors, SUPERBLOCK), (part.numbers, group)] if isinstance(part, Products) else [(part, group)]
        ):
            if numbers is not None and numbers.shape != (needed := (outputs, -(-inputs // per))):
                raise ValueError(f"scales or offsets of shape {list(numbers.shape)}: these weights need {list(needed)}")
    if not format.is_known:
        raise ValueError(
            f"{bits} bits in groups of {group} inputs, scales {format.scales.name} and offsets {format.offsets.name}: "
            "there is no kernel for weights that are stored so"
        )
    lowest, highest = (0, 2**bits - 1) if offsets is not None else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    least, most = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
    if not lowest <= least <= most <= highest:
        raise ValueError(f"values of {bits} bits from {least} to {most}: use {lowest} to {highest}")


def _spread(groups: Tensor, group: int, inputs: int) -> Tensor:
    """Expands the numbers of groups `[…, G]` to inputs `[…, K]`."""
    return groups[..., None].expand(*groups.shape, group).flatten(-2)[..., :inputs]


def keep_parts(model: nn.Module) -> None:
    """Stores the parts of all quantized weights in their tensors, for products by torch alone."""
    for weight in model.parameters():
        if isinstance(weight, QuantizedTensor):
            weight.keep_parts()


def of_outputs(weight: Tensor, outputs_U: Tensor) -> Tensor:
    """The weights of some outputs `[U]`, stored as all are."""
    if isinstance(weight, QuantizedTensor):
        return weight.of_outputs(outputs_U)
    return weight.detach()[outputs_U.to(weight.device)]


def as_numbers(weight: Tensor) -> Tensor:
    """A weight, quantized or not, as numbers."""
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight


@torch.no_grad()
def dequantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces all quantized weights by numbers, in place; all weights then have this dtype."""
    numbers: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(weight, QuantizedTensor):
                if id(weight) not in numbers:  # a head may be the embedding
                    numbers[id(weight)] = nn.Parameter(numbers_of(weight.parts, weight.group).to(dtype))
                setattr(module, name, numbers[id(weight)])
    model.to(dtype)


def rounded_inputs(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes activations `[M, K]`.

    Returns:
        `[M, B, BLOCK]` integers as float32, 0 after the last input; `[M, B]` scales, NaN where an input is.
    """
    padded = functional.pad(inputs.float(), (0, -inputs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = padded.abs().amax(dim=2)
    # 127 divided by less would be infinite.
    is_zero = largest < torch.finfo(torch.float32).tiny * 128
    # Not `LARGEST / largest`, which torch computes as a product with a rounded reciprocal.
    factors = torch.full_like(largest, LARGEST).div(largest).where(~is_zero, 0.0)
    return (padded * factors[:, :, None]).round().nan_to_num(0), (largest * (1 / LARGEST)).where(~is_zero, 0.0)


def _linear(inputs: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """The product `[…, N]` of inputs `[…, K]`, by the weight's kernel or torch."""
    flat_MK = inputs.flatten(0, -2)
    totals_MN = plain_product(flat_MK, weight) if weight.product is None else weight.product(flat_MK)
    if bias is not None:
        totals_MN = totals_MN + bias.float()
    return totals_MN.to(inputs.dtype).unflatten(0, inputs.shape[:-1])


def plain_product(inputs_MK: Tensor, weight: QuantizedTensor) -> Tensor:
    """The product `[M, N]` by torch: slow, and the oracle of the kernels."""
    rounded = rounded_inputs(inputs_MK)
    values, scales, offsets = weight.parts
    step, has_one_scale = min(weight.group, BLOCK), weight.format.group == 0
    pieces = []
    for first in range(0, len(weight), OUTPUTS_AT_ONCE):
        rows = slice(first, first + OUTPUTS_AT_ONCE)
        row_scales, row_offsets = scales[rows].float(), None if offsets is None else offsets[rows].float()
        totals_MN = _products(
            rounded, values[rows], None if has_one_scale else row_scales, row_offsets, step, weight.group
        )
        pieces.append(totals_MN * row_scales[:, 0] if has_one_scale else totals_MN)
    return torch.cat(pieces, dim=1)


def _products(
    rounded: tuple[Tensor, Tensor],
    values_NK: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    step: int,
    group: int,
) -> Tensor:
    """Sums `[M, N]` over blocks; without `scales`, before the factor of each output's one scale."""
    (blocks_MBI, scales_MB), K = rounded, values_NK.shape[1]
    totals_MN = torch.zeros(len(blocks_MBI), len(values_NK), dtype=torch.float32, device=values_NK.device)
    for block in range(-(-K // BLOCK)):
        products_MN = torch.zeros_like(totals_MN)
        for first in range(block * BLOCK, min((block + 1) * BLOCK, K), step):
            last = min(first + step, (block + 1) * BLOCK, K)
            few_MI = blocks_MBI[:, block, first - block * BLOCK : last - block * BLOCK]
            # Integers below 2^24: exact in any order.
            sums_MN = few_MI @ values_NK[:, first:last].float().T
            if offsets is not None:
                products_MN = _fused(few_MI.sum(1, keepdim=True), offsets[:, first // group], products_MN)
            if scales is not None:
                sums_MN = _fused(sums_MN, scales[:, first // group], products_MN)
            products_MN = sums_MN
        totals_MN = _fused(products_MN, scales_MB[:, block, None], totals_MN)
    return totals_MN


def _fused(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """`left * right + total`, rounded once: in float64 the product is exact."""
    product, total = left.double() * right.double(), total.double()
    result = product + total
    of_total = result - product
    error = (product - (result - of_total)) + (total - of_total)
    # Rounded to odd: for a sum in the middle of two float32 numbers, the error of float64 decides which is nearer.
    is_even = result.view(torch.int64) & 1 == 0
    result = torch.where(is_even & (error.abs() > 0), result.nextafter(error.sign() * torch.inf), result)
    return result.float()

"""Weights packed in the order in which the C++ reads them, and products with them."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paradraft.formats.gguf_blocks import Numbers, Products
from paradraft.models.forward.cpu.build import library
from paradraft.models.forward.cpu.threads import one_torch_thread
from paradraft.models.quantized import Parts, QuantizedTensor, numbers_of
from paradraft.models.quantized_format import SUPERBLOCK, Format, NumberKind

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Storage types of weights, with their codes in `gemm.h`."""

CHECKED_AT_ONCE = 2**18
"""Weights that are unpacked at a time to check the packing, so that they stay in the CPU cache."""


class WrongPassError(Exception):
    """A pass in C++ differs from the model's own code; `seconds` is its time for one token, if there is a pass."""

    def __init__(self, difference: str, seconds: float | None = None) -> None:
        super().__init__(difference)
        self.seconds = seconds


class _Grouping(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in Format._fields)


class _Weights(ctypes.Structure):
    """The struct `Weights` of `integers.h`."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("values", "scales", "offsets", "scale_numbers", "offset_numbers")
    )

    @staticmethod
    def of(parts: Parts) -> _Weights:
        values, *numbers = parts
        factors = [each.factors if isinstance(each, Products) else each for each in numbers]
        products = [each.numbers if isinstance(each, Products) else None for each in numbers]
        return _Weights(*(None if each is None else each.data_ptr() for each in (values, *factors, *products)))


class Matrix(ctypes.Structure):
    """The struct of that name in `gemm.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64), ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("grouping", _Grouping),
    )  # fmt: skip


def is_known(weight: Tensor) -> bool:
    """Whether weights can be packed: plain or quantized ones."""
    return isinstance(weight, QuantizedTensor) or type(weight) in (nn.Parameter, Tensor)


def packed_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which weights `[outputs, inputs]` are packed: bfloat16 where that is exact, as for nearly all
    published weights, and inputs can be packed in pairs."""
    if isinstance(weight, QuantizedTensor):
        return torch.int8
    is_bfloat16 = weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().float(), weight)
    return torch.bfloat16 if is_bfloat16 and weight.shape[1] % 2 == 0 else torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class Panels:
    """The weights of one or more linear layers, in the order in which the C++ reads them.

    Args:
        outputs: of all layers.
        inputs: of each.
        numbers: the weights, `[bytes]` uint8.
        dtype: of the packed weights, one of `KINDS`.
        scales: `[outputs]` float32 if quantized with one scale for each output, else None.
        format: if quantized, else None.
    """

    outputs: int
    inputs: int
    numbers: Tensor
    dtype: torch.dtype
    scales: Tensor | None = None
    format: Format | None = None

    def matrix(self, bias: Tensor | None = None) -> Matrix:
        """As a struct for the C++."""
        grouping = None if self.format is None else _Grouping(*self.format)
        return _matrix(self.outputs, self.inputs, self.dtype, self.numbers, self.scales, bias, grouping)

    def numbers_of(self, first: int, count: int, threads: int = 1) -> Tensor:
        """The weights `[count, inputs]` of outputs from `first` on, as passes read them, as float32."""
        numbers = torch.empty(count, self.inputs, dtype=torch.float32, device="cpu")
        library().copy_outputs(ctypes.byref(self.matrix()), first, count, numbers.data_ptr(), threads)
        return numbers

    def unpacked(self, first: int, count: int) -> Parts:
        """The parts of outputs from `first` on, if quantized."""
        assert self.format is not None
        group = self.format.group
        values = torch.empty(count, self.inputs, dtype=torch.int8, device="cpu")
        scales, offsets = (
            _no_numbers(kind, count, -(-self.inputs // group) if group else 0, self.inputs)
            for kind in (self.format.scales, self.format.offsets)
        )
        parts = _Weights.of((values, scales, offsets))  # type: ignore[arg-type]  # scales are there
        library().unpack_integers(ctypes.byref(self.matrix()), first, count, ctypes.byref(parts))
        if self.scales is not None:
            scales = self.scales[first : first + count, None].to(self.format.scales.dtype)
        assert scales is not None
        return values, scales, offsets


def _no_numbers(kind: NumberKind, outputs: int, groups: int, inputs: int) -> Numbers | None:
    """Empty scales or offsets."""
    if kind is NumberKind.NONE:
        return None
    if kind is not NumberKind.PRODUCTS:
        return torch.empty(outputs, groups, dtype=kind.dtype, device="cpu")
    factors = torch.empty(outputs, -(-inputs // SUPERBLOCK), dtype=kind.dtype, device="cpu")
    return Products(factors=factors, numbers=torch.empty(outputs, groups, dtype=torch.int8, device="cpu"))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """A quantized weight that is `count` outputs of panels, from output `first` on."""

    panels: Panels
    first: int
    count: int

    def __call__(self) -> Parts:
        """All parts."""
        return self.panels.unpacked(self.first, self.count)

    def rows(self, outputs: Tensor) -> Tensor:
        """See `HasRows`."""
        return torch.cat([self.panels.numbers_of(self.first + output, 1) for output in outputs.tolist()])


class PackedMatrix:
    """The weights of linear layers with the same inputs, packed as one matrix.

    Plain weights are copied. Quantized weights free their parts, which are here from then on; panels of just these
    weights in this order are reused.

    Args:
        weights: each `[outputs, inputs]`, one that `is_known`; all of one dtype, or quantized in one format.
        biases: of each `[outputs]`, or None.

    Raises:
        CannotBuildError: there is no library for this machine.
        WrongPassError: the packed weights differ from the original ones.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> None:
        for weight, bias in zip(weights, biases, strict=False):
            assert bias is None or bias.shape == (len(weight),), "a bias has one number for each output"
        self._bias = _joined(weights, biases)
        if quantized := [weight for weight in weights if isinstance(weight, QuantizedTensor)]:
            assert len(quantized) == len(weights)
            self.panels = _panels_of(quantized) or _pack_quantized(quantized)
        else:
            whole = torch.cat([weight.detach() for weight in weights])
            whole = whole.to(packed_dtype(whole))
            outputs, inputs = whole.shape
            self.panels = Panels(outputs=outputs, inputs=inputs, numbers=_packed(whole), dtype=whole.dtype)
            _check_packed(self.panels, lambda rows: whole[rows].float())
        self.matrix = self.panels.matrix(self._bias)

    def multiply(self, inputs: Tensor, outputs: Tensor, threads: int | None = None) -> bool:
        """Computes the layers' outputs in place.

        Args:
            inputs: `[rows, inputs]` float32; or bfloat16, if the weights are packed as bfloat16.
            outputs: `[rows, outputs]` float32, overwritten.
            threads: most threads; by default as many as torch uses.

        Returns:
            False, with nothing done, if the CPU has no products of bfloat16.
        """
        are_bfloat16 = inputs.dtype == torch.bfloat16
        assert are_bfloat16 or inputs.dtype == torch.float32, "other numbers would be read as these"
        assert inputs.shape == (len(outputs), self.matrix.inputs) and outputs.shape[1] == self.matrix.outputs
        assert inputs.is_contiguous() and outputs.is_contiguous() and outputs.dtype == torch.float32
        assert not are_bfloat16 or self.matrix.kind == KINDS[torch.bfloat16]
        return not library().multiply_all(
            ctypes.byref(self.matrix), inputs.data_ptr(), are_bfloat16, len(inputs), outputs.data_ptr(),
            torch.get_num_threads() if threads is None else threads,
        )  # fmt: skip


def _joined(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of all layers, concatenated, 0 for a layer without one; None if none has one."""
    if all(bias is None for bias in biases):
        return None
    parts = zip(weights, biases, strict=True)
    return torch.cat(
        [
            torch.zeros(len(weight), dtype=torch.float32, device="cpu") if bias is None else bias.detach().float()
            for weight, bias in parts
        ]
    )


def _matrix(
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    numbers: Tensor | None,
    scales: Tensor | None,
    bias: Tensor | None,
    grouping: _Grouping | None,
) -> Matrix:
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (numbers, scales, bias)]
    return Matrix(addresses[0], outputs, inputs, KINDS[dtype], *addresses[1:], grouping or _Grouping())


def _packed(weights: Tensor) -> Tensor:
    outputs, inputs = weights.shape
    matrix = _matrix(outputs, inputs, weights.dtype, None, None, None, None)
    numbers = torch.empty(library().packed_bytes(ctypes.byref(matrix)), dtype=torch.uint8, device="cpu")
    library().pack_matrix(ctypes.byref(matrix), weights.data_ptr(), numbers.data_ptr())
    return numbers


def _packed_integers(parts: Parts, format: Format) -> Tensor:
    outputs, inputs = parts[0].shape
    matrix = _matrix(outputs, inputs, torch.int8, None, None, None, _Grouping(*format))
    numbers = torch.empty(library().packed_bytes(ctypes.byref(matrix)), dtype=torch.uint8, device="cpu")
    library().pack_integers(ctypes.byref(matrix), ctypes.byref(_Weights.of(parts)), numbers.data_ptr())
    return numbers


def _panels_of(weights: Sequence[QuantizedTensor]) -> Panels | None:
    """The panels that consist of just these weights, in this order; None without such."""
    rows = [weight.source for weight in weights if isinstance(weight.source, PackedRows)]
    if len(rows) < len(weights) or any(each.panels is not rows[0].panels for each in rows):
        return None
    firsts = [sum(map(len, weights[:index])) for index in range(len(weights))]
    is_whole = rows[0].panels.outputs == sum(map(len, weights))
    return rows[0].panels if is_whole and [each.first for each in rows] == firsts else None


def _pack_quantized(weights: Sequence[QuantizedTensor]) -> Panels:
    format, inputs = weights[0].format, weights[0].shape[1]
    assert all(weight.format == format for weight in weights), "weights of different formats"
    values, scales, offsets = parts = joined([weight.parts for weight in weights])
    panels = Panels(
        outputs=len(values),
        inputs=inputs,
        numbers=_packed_integers(parts, format),
        dtype=torch.int8,
        scales=None if format.group else scales.float().flatten(),
        format=format,
    )
    _check_packed(
        panels,
        lambda rows: numbers_of(
            (values[rows], scales[rows], None if offsets is None else offsets[rows]), weights[0].group
        ),
    )
    first = 0
    for weight in weights:
        weight.move_to(PackedRows(panels=panels, first=first, count=len(weight)))
        first += len(weight)
    return panels


def joined(parts: Sequence[Parts]) -> Parts:
    """Concatenates the parts of weights of one format."""
    values, scales, offsets = zip(*parts, strict=True)
    joined_scales = _joined_numbers(scales)
    assert joined_scales is not None
    return torch.cat(values) if values[1:] else values[0].contiguous(), joined_scales, _joined_numbers(offsets)


def _joined_numbers(numbers: Sequence[Numbers | None]) -> Numbers | None:
    if (first := numbers[0]) is None:
        return None
    if isinstance(first, Products):
        return Products(
            factors=torch.cat([each.factors for each in numbers if isinstance(each, Products)]),
            numbers=torch.cat([each.numbers for each in numbers if isinstance(each, Products)]),
        )
    return torch.cat([each for each in numbers if isinstance(each, Tensor)])


def _check_packed(panels: Panels, numbers_of: Callable[[slice], Tensor]) -> None:
    """Raises WrongPassError if packed weights differ from the original ones in any bit."""
    step, threads = max(CHECKED_AT_ONCE // panels.inputs, 1), torch.get_num_threads()
    with one_torch_thread():  # several threads would wait for each other in each of many short steps
        for first in range(0, panels.outputs, step):
            rows = slice(first, min(first + step, panels.outputs))
            packed, expected = panels.numbers_of(rows.start, rows.stop - rows.start, threads), numbers_of(rows)
            if not torch.equal(packed.view(torch.int32), expected.view(torch.int32)):
                raise WrongPassError(f"weights of the shape {[panels.outputs, panels.inputs]} are packed as others")


def compute_products(model: nn.Module) -> None:
    """Makes the C++ compute all products with quantized weights in a model's own code.

    Torch computes those of weights whose packing is wrong, much more slowly, with a warning. Raises CannotBuildError.
    """
    for weight in {id(weight): weight for weight in model.parameters()}.values():
        if isinstance(weight, QuantizedTensor) and weight.device.type == "cpu":
            try:
                weight.product = partial(_product, PackedMatrix([weight]))
            except WrongPassError as error:
                weight.keep_parts()
                warnings.warn(f"PyTorch computes some products, many times slower: {error}", stacklevel=2)


def _product(matrix: PackedMatrix, inputs_MK: Tensor) -> Tensor:
    outputs_MN = torch.empty(len(inputs_MK), matrix.matrix.outputs, dtype=torch.float32, device="cpu")
    matrix.multiply(inputs_MK.float().contiguous(), outputs_MN)
    return outputs_MN

"""Matrices of weights in the order in which the C++ reads them."""

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
from paradraft.models.quantized import SUPERBLOCK, Format, NumberKind, Parts, QuantizedTensor, numbers_of

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""How weights may be stored, with the numbers that `gemm.h` has for them."""

CHECKED_AT_ONCE = 2**18
"""Weights that are float32 numbers at a time, while it is checked how they were packed: they stay in the cache."""


class WrongPassError(Exception):
    """A pass in C++ does not compute what the model's own code does, and how far it is from that.

    Args:
        found: in words.
        seconds: that the pass takes for one token, if it was made.
    """

    def __init__(self, found: str, seconds: float | None = None) -> None:
        super().__init__(found)
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
        firsts = [each.factors if isinstance(each, Products) else each for each in numbers]
        products = [each.numbers if isinstance(each, Products) else None for each in numbers]
        return _Weights(*(None if each is None else each.data_ptr() for each in (values, *firsts, *products)))


class Matrix(ctypes.Structure):
    """The struct of that name in `gemm.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64), ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("grouping", _Grouping),
    )  # fmt: skip


def is_known(weight: Tensor) -> bool:
    """Whether weights can be packed: plain ones, or those of few bits."""
    return isinstance(weight, QuantizedTensor) or type(weight) in (nn.Parameter, Tensor)


def packed_dtype(weight: Tensor) -> torch.dtype:
    """What weights, `[outputs, inputs]`, are packed as: bfloat16 where nothing is lost by it, as in nearly all that are
    published. Those are packed in pairs of inputs."""
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
        dtype: what they are packed as, one of `KINDS`.
        scales: `[outputs]` float32, of whole numbers that have one scale for each output, else None.
        format: of whole numbers, else None.
    """

    outputs: int
    inputs: int
    numbers: Tensor
    dtype: torch.dtype
    scales: Tensor | None = None
    format: Format | None = None

    def matrix(self, bias: Tensor | None = None) -> Matrix:
        """The same for the C++."""
        grouping = None if self.format is None else _Grouping(*self.format)
        return _matrix(self.outputs, self.inputs, self.dtype, self.numbers, self.scales, bias, grouping)

    def numbers_of(self, first: int, count: int, threads: int = 1) -> Tensor:
        """`[count, inputs]` the weights of some outputs as float32, as passes read them."""
        numbers = torch.empty(count, self.inputs, dtype=torch.float32, device="cpu")
        library().copy_outputs(ctypes.byref(self.matrix()), first, count, numbers.data_ptr(), threads)
        return numbers

    def unpacked(self, first: int, count: int) -> Parts:
        """What was packed of some outputs, if they are whole numbers."""
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
    """Room for scales or offsets."""
    if kind is NumberKind.NONE:
        return None
    if kind is not NumberKind.PRODUCTS:
        return torch.empty(outputs, groups, dtype=kind.dtype, device="cpu")
    factors = torch.empty(outputs, -(-inputs // SUPERBLOCK), dtype=kind.dtype, device="cpu")
    return Products(factors=factors, numbers=torch.empty(outputs, groups, dtype=torch.int8, device="cpu"))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """Where the parts of a weight are: some outputs of panels.

    Args:
        panels: of whole numbers.
        first: output.
        count: of outputs.
    """

    panels: Panels
    first: int
    count: int

    def __call__(self) -> Parts:
        """The parts."""
        return self.panels.unpacked(self.first, self.count)

    def rows(self, outputs: Tensor) -> Parts:
        """The parts of these outputs `[U]`, of those that there are here."""
        return joined([self.panels.unpacked(self.first + output, 1) for output in outputs.tolist()])


class PackedMatrix:
    """The weights of linear layers with the same inputs, as one matrix: a copy of plain ones.

    Weights of few bits forget their parts, which are here then. Those that are packed already, these and no others in
    this order, stay where they are.

    Args:
        weights: each `[outputs, inputs]`, one that `is_known`; all of one dtype, or all of one format of few bits.
        biases: of each `[outputs]`, or None.

    Raises:
        CannotBuildError: there is no library for this machine.
        WrongPassError: weights were packed as others than they are.
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
            _check_packed(self.panels, lambda few: whole[few].float())
        self.matrix = self.panels.matrix(self._bias)

    def multiply(self, inputs: Tensor, outputs: Tensor, threads: int | None = None) -> bool:
        """Sets `outputs`, `[rows, outputs]` of float32, to what the layers make of `inputs`, `[rows, inputs]`.

        Args:
            inputs: float32; or bfloat16, if the weights are packed as such.
            outputs: changed in place.
            threads: most threads; by default as many as torch uses.

        Returns:
            False, with nothing done, where the CPU has no products of bfloat16 numbers.
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
    """The biases of several layers in a row, zeros where a layer has none; None if none has one."""
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
    """The bytes of panels of numbers."""
    outputs, inputs = weights.shape
    matrix = _matrix(outputs, inputs, weights.dtype, None, None, None, None)
    numbers = torch.empty(library().packed_bytes(ctypes.byref(matrix)), dtype=torch.uint8, device="cpu")
    library().pack_matrix(ctypes.byref(matrix), weights.data_ptr(), numbers.data_ptr())
    return numbers


def _packed_integers(parts: Parts, format: Format) -> Tensor:
    """The bytes of panels of few bits."""
    outputs, inputs = parts[0].shape
    matrix = _matrix(outputs, inputs, torch.int8, None, None, None, _Grouping(*format))
    numbers = torch.empty(library().packed_bytes(ctypes.byref(matrix)), dtype=torch.uint8, device="cpu")
    library().pack_integers(ctypes.byref(matrix), ctypes.byref(_Weights.of(parts)), numbers.data_ptr())
    return numbers


def _panels_of(weights: Sequence[QuantizedTensor]) -> Panels | None:
    """The panels that have just these weights, in this order."""
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
        lambda few: numbers_of((values[few], scales[few], None if offsets is None else offsets[few]), weights[0].group),
    )
    first = 0
    for weight in weights:
        weight.move_to(PackedRows(panels=panels, first=first, count=len(weight)))
        first += len(weight)
    return panels


def joined(parts: Sequence[Parts]) -> Parts:
    """The parts of weights of one format as those of one matrix."""
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
    """Compares all weights, as they were packed, with what they were, to the last bit.

    Raises:
        WrongPassError: one is another.
    """
    step, threads = max(CHECKED_AT_ONCE // panels.inputs, 1), torch.get_num_threads()
    with one_torch_thread():  # several would wait for each other in each of many short steps
        for first in range(0, panels.outputs, step):
            few = slice(first, min(first + step, panels.outputs))
            found, expected = panels.numbers_of(few.start, few.stop - few.start, threads), numbers_of(few)
            if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
                raise WrongPassError(f"weights of the shape {[panels.outputs, panels.inputs]} are packed as others")


def compute_products(model: nn.Module) -> None:
    """Has the C++ compute all products of a model with weights of few bits, in the model's own code.

    Torch computes those of weights that would be packed wrongly, much more slowly, with a warning.

    Raises:
        CannotBuildError: there is no library for this machine.
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

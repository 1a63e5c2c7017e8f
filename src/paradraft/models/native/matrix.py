"""Weights in the order in which the C++ reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paradraft.models.native.build import library

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""How weights may be stored, with the numbers that `products.h` has for them."""


class Matrix(ctypes.Structure):
    """The struct of that name in `products.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64), ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p),
    )  # fmt: skip


def is_known(weight: Tensor) -> bool:
    """Whether weights can be packed: plain ones, or those that torchao has rounded to 8 bits with a scale an output."""
    if type(weight) in (nn.Parameter, Tensor):
        return True
    quantized: Any = weight
    return (
        type(weight).__name__ == "Int8Tensor"
        and quantized.act_quant_kwargs is None
        and quantized.scale.shape == (len(weight), 1)
        and (quantized.zero_point is None or not quantized.zero_point.any())
    )


def packed_dtype(weight: Tensor) -> torch.dtype:
    """What weights, `[outputs, inputs]`, are packed as: bfloat16 where nothing is lost by it, as in nearly all that are
    published. Those are packed in pairs of inputs."""
    if hasattr(weight, "qdata"):
        return torch.int8
    is_bfloat16 = weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().float(), weight)
    return torch.bfloat16 if is_bfloat16 and weight.shape[1] % 2 == 0 else torch.float32


class PackedMatrix:
    """A copy of the weights of linear layers with the same inputs, as one matrix.

    Args:
        weights: each `[outputs, inputs]`, one that `is_known`; all of one dtype.
        biases: of each `[outputs]`, or None.

    Raises:
        CannotBuildError: there is no library for this machine.
    """

    def __init__(self, weights: Sequence[Any], biases: Sequence[Tensor | None] = ()) -> None:
        scales = [weight.scale for weight in weights if hasattr(weight, "qdata")]
        whole = torch.cat([weight.qdata if scales else weight.detach() for weight in weights])
        whole = whole if scales else whole.to(packed_dtype(whole))
        outputs, inputs = whole.shape
        self._panels = torch.empty(library().packed_size(outputs, inputs), dtype=whole.dtype, device="cpu")
        library().pack_matrix(whole.data_ptr(), outputs, inputs, KINDS[whole.dtype], self._panels.data_ptr())
        self._scales = torch.cat(scales).flatten().float() if scales else None
        self._bias = None
        if any(bias is not None for bias in biases):
            parts = zip(weights, biases, strict=True)
            self._bias = torch.cat(
                [
                    torch.zeros(len(w), dtype=torch.float32, device="cpu") if b is None else b.detach().float()
                    for w, b in parts
                ]
            )
        self.matrix = Matrix(
            panels=self._panels.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            kind=KINDS[whole.dtype],
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )

    def multiply(self, inputs: Tensor, outputs: Tensor) -> bool:
        """Sets `outputs`, `[rows, outputs]` of float32, to what the layers make of `inputs`, `[rows, inputs]`.

        Args:
            inputs: float32; or bfloat16, if the weights are packed as such.
            outputs: changed in place.

        Returns:
            False, with nothing done, where the CPU has no products of bfloat16 numbers.
        """
        are_bfloat16 = inputs.dtype == torch.bfloat16
        assert not are_bfloat16 or self.matrix.kind == KINDS[torch.bfloat16]
        return not library().multiply_all(
            ctypes.byref(self.matrix), inputs.data_ptr(), are_bfloat16, len(inputs), outputs.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

"""Weights in the order in which the C++ reads them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paradraft.models.native.build import library


class Matrix(ctypes.Structure):
    """The struct of that name in `products.h`."""

    _fields_ = (
        ("panels", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64), ("bias", ctypes.c_void_p),
    )  # fmt: skip


def packed_dtype(weight: Tensor) -> torch.dtype:
    """What weights are packed as: bfloat16 where nothing is lost by it, as in nearly all that are published."""
    if weight.dtype == torch.bfloat16 or torch.equal(weight.bfloat16().float(), weight):
        return torch.bfloat16
    return torch.float32


class PackedMatrix:
    """A copy of the weights of a linear layer.

    Args:
        weight: `[outputs, inputs]` in float32 or bfloat16.
        bias: `[outputs]`, or None.

    Raises:
        CannotBuildError: there is no library for this machine.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        weight = weight.detach().to(packed_dtype(weight)).contiguous()
        is_bfloat16 = weight.dtype == torch.bfloat16
        self._panels = torch.empty(library().packed_size(outputs, inputs), dtype=weight.dtype)
        library().pack_matrix(weight.data_ptr(), outputs, inputs, is_bfloat16, self._panels.data_ptr())
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.matrix = Matrix(
            panels=self._panels.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            is_bfloat16=is_bfloat16,
            bias=None if self._bias is None else self._bias.data_ptr(),
        )

    def multiply(self, inputs: Tensor, outputs: Tensor) -> None:
        """Sets `outputs`, `[rows, outputs]`, to what the layer makes of `inputs`, `[rows, inputs]`; all float32."""
        library().multiply_all(
            ctypes.byref(self.matrix), inputs.data_ptr(), len(inputs), outputs.data_ptr(), torch.get_num_threads()
        )

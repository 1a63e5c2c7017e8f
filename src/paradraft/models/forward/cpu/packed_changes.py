"""Gated changes as a pass in C++ reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from paradraft.models.forward.cpu.matrix import Matrix, PackedMatrix
from paradraft.models.forward.gated import GatedChange


class _LowRank(ctypes.Structure):
    _fields_ = (("down", Matrix), ("up", Matrix))


class _LayerChange(ctypes.Structure):
    _fields_ = (("qkv", _LowRank), ("output", _LowRank))


class Change(ctypes.Structure):
    """The struct of that name in `changed.h`."""

    _fields_ = (("first", ctypes.c_int64), ("last", ctypes.c_int64), ("layer", ctypes.POINTER(_LayerChange)))


class PackedChanges:
    """An array of changes for the C++, and what it points to.

    Args:
        changes: each with the ids that see it.
    """

    def __init__(self, changes: Sequence[tuple[range, GatedChange]]) -> None:
        self._kept: list[PackedMatrix] = []
        self.array = (Change * len(changes))(
            *(Change(first=ids.start, last=ids.stop, layer=self._layers(change)) for ids, change in changes)
        )

    def _layers(self, change: GatedChange) -> ctypes.Array[_LayerChange]:
        parts = zip(change.qkv_down, change.qkv_up, change.output_down, change.output_up, strict=True)
        layers = [
            _LayerChange(qkv=self._low_rank(down, up), output=self._low_rank(output_down, output_up))
            for down, up, output_down, output_up in parts
        ]
        return (_LayerChange * len(layers))(*layers)

    def _low_rank(self, down: Tensor, up: Tensor) -> _LowRank:
        packed = [PackedMatrix([weight.detach().to("cpu")]) for weight in (down, up)]
        self._kept += packed
        return _LowRank(*(each.matrix for each in packed))

"""Drafts drawn token by token in C++ (`selector.cpp`), each the best of the likeliest tokens of its position.

Shape letters: B rows of a batch, K positions of a draft, C likeliest tokens, V vocabulary, X rank.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import library
from paradraft.models.forward.cpu.draw import likeliest
from paradraft.models.forward.cpu.drawing import Arguments, NativePathHead, PassOutputs, places_of


class _Selector(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "vocabulary", "few")),
        *((name, ctypes.c_void_p) for name in ("before", "chosen")),
    )


class NativeSelector(NativePathHead):
    """Draws drafts with a selector, whose matrices are stored in bfloat16.

    It reads `[B, K, X]` H h of each position.

    Args:
        before: A, `[rows, X]`.
        chosen: B, `[V, X]`.
        few: tokens between which it decides.
    """

    CHAINS, TREES = "select_chains", "grow_selected"

    def __init__(self, before: Tensor, chosen: Tensor, few: int) -> None:
        self._before, self._chosen = (matrix.detach().bfloat16().contiguous() for matrix in (before, chosen))
        V, X = chosen.shape
        self._selector = _Selector(X, V, few, self._before.data_ptr(), self._chosen.data_ptr())
        library()

    def _arguments(self, outputs: PassOutputs, *, is_tree: bool) -> Arguments:
        B, K, V = outputs.logits.shape
        assert outputs.logits.dtype == torch.float32 and V == self._selector.vocabulary and len(outputs.anchors) == B
        assert outputs.reads is not None and outputs.reads.shape == (B, K, self._selector.rank)
        all_BK = torch.zeros(B, K, dtype=torch.long, device="cpu")
        ids_BKC, logits_BKC = likeliest(outputs.logits, all_BK, self._selector.few, threads=outputs.threads)
        noise = None if outputs.noise is None else outputs.noise.of(ids_BKC)
        places, kept = places_of(outputs, logits_BKC, noise)
        anchors_B = (ctypes.c_int64 * B)(*outputs.anchors)
        arguments = [ctypes.byref(self._selector), ctypes.byref(places), ids_BKC.data_ptr(), anchors_B]
        return arguments, [places, ids_BKC, anchors_B, *kept]

"""What heads in C++ that draw drafts token by token share: the outputs of a pass (`native/drawing.h`).

Shape letters: B rows of a batch, K positions of a draft, V vocabulary, X any size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor, float32, float64


class Places(ctypes.Structure):
    """The struct `Places`: the positions of the drafts."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "places")),
        *((name, ctypes.c_void_p) for name in ("logits", "reads", "temperatures", "noise")),
    )


def places_of(
    logits_BKX: Tensor, reads: Tensor | None, temperatures: Sequence[float], noise_BKV: Tensor | None
) -> tuple[Places, list[object]]:
    """The library's inputs, and objects that must live while it runs.

    Args:
        logits_BKX: float32, of all tokens or of some.
        reads: what a head reads of the states, `[B, …, X]` in any floating type.
        temperatures: of the rows; 0 is greedy.
        noise_BKV: float64; None if all rows are greedy.
    """
    B, K, _ = logits_BKX.shape
    assert noise_BKV is not None or not any(temperatures)
    logits, reads = logits_BKX.contiguous(), None if reads is None else reads.float().contiguous()
    noise = None if noise_BKV is None else noise_BKV.contiguous()
    assert logits.dtype == float32 and len(temperatures) == B
    assert noise is None or (noise.shape[:2] == logits.shape[:2] and noise.dtype == float64)
    temperatures_B = (ctypes.c_float * B)(*temperatures)
    places = Places(
        rows=B, places=K, logits=logits.data_ptr(), reads=None if reads is None else reads.data_ptr(),
        temperatures=ctypes.addressof(temperatures_B), noise=None if noise is None else noise.data_ptr(),
    )  # fmt: skip
    return places, [logits, reads, noise, temperatures_B]

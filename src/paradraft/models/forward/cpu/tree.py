"""Draft trees in C++ (`tree.cpp`): tree growth, and compaction of the keys and values of an accepted path.

Without a library both return None, and the caller does it in Python.

Shape letters: B rows of a batch, K positions, C candidates, N nodes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import CannotBuildError, library


def _library() -> ctypes.CDLL | None:
    try:
        return library()
    except CannotBuildError:
        return None


def grow(log_probs_BKC: Tensor, budget: int, *, aside: float) -> Tensor | None:
    """`sampling.candidates.grow` in C++, with the same arguments (on any device) and result.

    Returns:
        `[3, B, N]` on the CPU: depths, ranks and parents; None without the library.
    """
    native = _library()
    if native is None:
        return None
    B, K, C = log_probs_BKC.shape
    nodes = torch.full((3, B, budget), -1, dtype=torch.long, device="cpu")
    if not nodes.numel() or not K * C:
        return nodes[:, :, :0]
    log_probs_BKC = log_probs_BKC.detach().to(device="cpu", dtype=torch.float64).contiguous()
    depths, ranks, parents = (part.data_ptr() for part in nodes)
    discount = math.log(aside) if aside else -math.inf
    most = native.grow_trees(log_probs_BKC.data_ptr(), B, K, C, budget, discount, depths, ranks, parents)
    return nodes[:, :, :most]


def compact(stored: Sequence[Tensor], first_slot_B: Tensor, path_BN: Tensor) -> bool | None:
    """`kv_cache.compact` in C++, of tensors `[B, C, H, D]` on the CPU of one shape and dtype.

    Returns:
        True; None, with nothing done, without the library or if a path is not ascending.
    """
    native = _library()
    if native is None or not all(tensor.is_contiguous() for tensor in stored):
        return None
    B, slots, heads, size = stored[0].shape
    addresses = (ctypes.c_void_p * len(stored))(*(tensor.data_ptr() for tensor in stored))
    first_slot_B, path_BN = first_slot_B.contiguous(), path_BN.contiguous()
    is_wrong = native.compact_paths(
        ctypes.addressof(addresses), len(stored), slots, heads * size * stored[0].element_size(),
        first_slot_B.data_ptr(), path_BN.data_ptr(), B, path_BN.shape[1],
    )  # fmt: skip
    return None if is_wrong else True

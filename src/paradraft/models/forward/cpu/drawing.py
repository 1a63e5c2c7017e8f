"""What heads in C++ that draw drafts token by token share: the outputs of a pass (`native/drawing.h`), and the calls.

Shape letters: B rows of a batch, K positions of a draft, N nodes of a tree, V vocabulary, X rank of a head.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import library
from paradraft.sampling.noise import PositionNoise


class Places(ctypes.Structure):
    """The struct `Places`: the positions of the drafts."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "places")),
        *((name, ctypes.c_void_p) for name in ("logits", "reads", "temperatures", "noise", "starts", "ids")),
    )


class PassOutputs(NamedTuple):
    """What drafts are drawn from, as by the match rule.

    Args:
        anchors: by row, the token before the first position.
        logits: `[B, K, V]` float32.
        reads: `[B, …, X]` what a head reads of the states, see the heads.
        temperatures: of the rows; 0 is greedy.
        noise: None if all rows are greedy.
        threads: most threads.
    """

    anchors: Sequence[int]
    logits: Tensor
    reads: Tensor | None
    temperatures: Sequence[float]
    noise: PositionNoise | None
    threads: int


Arguments = tuple[list[Any], list[object]]
"""The first arguments of the library's functions, and objects that must live while these run."""


class NativePathHead(ABC):
    """A head in C++. Subclasses name the library's functions that draw chains and trees."""

    CHAINS: str
    TREES: str

    @abstractmethod
    def _arguments(self, outputs: PassOutputs, *, is_tree: bool) -> Arguments: ...

    def chains(self, outputs: PassOutputs) -> Tensor:
        """The tokens `[B, K]`; `INVALID` where logits are NaN or the largest is infinite."""
        tokens_BK = torch.empty(outputs.logits.shape[:2], dtype=torch.long, device="cpu")
        arguments, kept = self._arguments(outputs, is_tree=False)
        getattr(library(), self.CHAINS)(*arguments, tokens_BK.data_ptr(), outputs.threads)
        del kept
        return tokens_BK

    def trees(self, outputs: PassOutputs, *, number: int, budget: int) -> tuple[Tensor, Tensor]:
        """The tokens and the parents `[B, N]` of each row's likeliest nodes, best first, `ABSENT` after the last one.

        The likelihood of a token is the softmax of its scores, which are the logits divided by the temperature, plus
        noise.

        Args:
            number: of candidates after a node.
            budget: N.
        """
        rows, _, most = outputs.logits.shape
        nodes = torch.empty(2, rows, budget, dtype=torch.long, device="cpu")
        arguments, kept = self._arguments(outputs, is_tree=True)
        getattr(library(), self.TREES)(
            *arguments, min(number, most), budget, nodes[0].data_ptr(), nodes[1].data_ptr(), outputs.threads
        )
        del kept
        return nodes[0], nodes[1]


def places_of(
    outputs: PassOutputs, logits_BKX: Tensor, noise: Tensor | None, starts_BK: Tensor | None = None,
    ids: Tensor | None = None,
) -> tuple[Places, list[object]]:  # fmt: skip
    """The positions, and objects that must live while the library reads them.

    Args:
        logits_BKX: of all tokens, or of some.
        noise: of these.
        starts_BK: in place of it, where the random numbers of positions begin.
        ids: `[X]` of these tokens, for such numbers; None for all.
    """
    B, K, _ = outputs.logits.shape
    assert outputs.logits.dtype == logits_BKX.dtype == torch.float32 and len(outputs.temperatures) == B
    assert outputs.noise is not None or not any(outputs.temperatures)
    assert noise is None or (noise.shape == logits_BKX.shape and noise.dtype == torch.float64)
    assert starts_BK is None or (starts_BK.shape == (B, K) and starts_BK.dtype == torch.int64)
    assert ids is None or (ids.shape == logits_BKX.shape[2:] and ids.is_contiguous())
    noise = None if noise is None else noise.contiguous()
    starts_BK = None if starts_BK is None else starts_BK.contiguous()
    logits, reads = logits_BKX.contiguous(), None if outputs.reads is None else outputs.reads.float().contiguous()
    temperatures_B = (ctypes.c_float * B)(*outputs.temperatures)
    places = Places(
        rows=B, places=K, logits=logits.data_ptr(), reads=None if reads is None else reads.data_ptr(),
        temperatures=ctypes.addressof(temperatures_B), noise=None if noise is None else noise.data_ptr(),
        starts=None if starts_BK is None else starts_BK.data_ptr(), ids=None if ids is None else ids.data_ptr(),
    )  # fmt: skip
    return places, [logits, reads, noise, starts_BK, ids, temperatures_B]

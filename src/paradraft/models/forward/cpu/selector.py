"""Drafts drawn token by token in C++ (`selector.cpp`), each the best of the likeliest tokens of its position.

Shape letters: B rows of a batch, K positions of a draft, N nodes of a tree, V vocabulary, X rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import library
from paradraft.models.forward.cpu.draw import likeliest
from paradraft.models.forward.cpu.drawing import places_of


class _Selector(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "vocabulary", "few")),
        *((name, ctypes.c_void_p) for name in ("before", "chosen")),
    )


class NativeSelector:
    """Draws drafts with a selector, whose matrices are stored in bfloat16.

    Args:
        before: A, `[rows, X]`.
        chosen: B, `[V, X]`.
        few: tokens between which it decides.
    """

    def __init__(self, before: Tensor, chosen: Tensor, few: int) -> None:
        self._before, self._chosen = (matrix.detach().bfloat16().contiguous() for matrix in (before, chosen))
        V, X = chosen.shape
        self._selector = _Selector(X, V, few, self._before.data_ptr(), self._chosen.data_ptr())
        library()

    def chains(
        self,
        anchors: Sequence[int],
        logits_BKV: Tensor,
        states_BKX: Tensor,
        temperatures: Sequence[float],
        noise_BKV: Tensor | None,
        threads: int,
    ) -> Tensor:
        """The tokens `[B, K]`, drawn as by the match rule; `INVALID` where logits are NaN or the largest is infinite.

        Args:
            anchors: by row, the token before the first position.
            logits_BKV: float32.
            states_BKX: H h of each position.
            temperatures: of the rows; 0 is greedy.
            noise_BKV: float64; None if all rows are greedy.
            threads: most threads.
        """
        tokens_BK = torch.empty(logits_BKV.shape[:2], dtype=torch.long, device="cpu")
        likeliest_BKC, best_BKC = self._likeliest(logits_BKV, states_BKX, threads)
        places, kept = places_of(best_BKC, states_BKX, temperatures, noise_BKV)
        library().select_chains(
            ctypes.byref(self._selector), ctypes.byref(places), likeliest_BKC.data_ptr(), _ids(anchors),
            tokens_BK.data_ptr(), threads,
        )  # fmt: skip
        del kept
        return tokens_BK

    def trees(
        self,
        anchors: Sequence[int],
        logits_BKV: Tensor,
        states_BKX: Tensor,
        temperatures: Sequence[float],
        noise_BKV: Tensor | None,
        threads: int,
        *,
        number: int,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        """The tokens and the parents `[B, N]` of each row's likeliest nodes, best first, `ABSENT` after the last one.

        The likelihood of a token is the softmax of the scores of its position, divided by the temperature, plus noise.
        `number` is that of candidates after a node, `budget` is N; see `chains` for the others.
        """
        nodes = torch.empty(2, len(logits_BKV), budget, dtype=torch.long, device="cpu")
        likeliest_BKC, best_BKC = self._likeliest(logits_BKV, states_BKX, threads)
        places, kept = places_of(best_BKC, states_BKX, temperatures, noise_BKV)
        library().grow_selected(
            ctypes.byref(self._selector), ctypes.byref(places), likeliest_BKC.data_ptr(), _ids(anchors), number, budget,
            nodes[0].data_ptr(), nodes[1].data_ptr(), threads,
        )  # fmt: skip
        del kept
        return nodes[0], nodes[1]

    def _likeliest(self, logits_BKV: Tensor, states_BKX: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        B, K, V = logits_BKV.shape
        assert V == self._selector.vocabulary and states_BKX.shape == (B, K, self._selector.rank)
        assert logits_BKV.dtype == torch.float32
        all_BK = torch.zeros(logits_BKV.shape[:2], dtype=torch.long, device="cpu")
        return likeliest(logits_BKV, all_BK, self._selector.few, threads=threads)


def _ids(tokens: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(tokens))(*tokens)

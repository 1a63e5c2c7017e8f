"""Drafts drawn token by token in C++ (`correction.cpp`), with logits corrected by the tokens drawn before.

Shape letters: B rows of a batch, K positions of a draft, N nodes of a tree, V vocabulary, D hidden size, X rank of the
correction.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import library
from paradraft.models.forward.cpu.drawing import Places, places_of
from paradraft.models.forward.cpu.matrix import Matrix, PackedMatrix


class _Correction(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("token", "memory", "correction")),
        *((name, ctypes.c_void_p) for name in ("embedding", "embedding_bfloat16")),
    )


class NativeCorrection:
    """Draws drafts with a previous-token head, or with a Markov head, which has no `token` and no `memory`.

    Args:
        embedding: `[rows, D]` in float32 or bfloat16; `[rows, X]` of a Markov head.
        token: E, `[X, D]`.
        memory: R, `[X, X]`.
        correction: W C, `[V, X]`.
    """

    def __init__(self, embedding: Tensor, token: Tensor | None, memory: Tensor | None, correction: Tensor) -> None:
        self._embedding = embedding.detach().contiguous()
        is_bfloat16 = embedding.dtype == torch.bfloat16
        assert is_bfloat16 or embedding.dtype == torch.float32, "other numbers would be read as these"
        self._matrices = [None if weight is None else PackedMatrix([weight]) for weight in (token, memory, correction)]
        self._correction = _Correction(
            *(Matrix() if packed is None else packed.matrix for packed in self._matrices),
            None if is_bfloat16 else self._embedding.data_ptr(),
            self._embedding.data_ptr() if is_bfloat16 else None,
        )
        library()

    def chains(
        self,
        logits_BKV: Tensor,
        reads_BKX: Tensor | None,
        temperatures: Sequence[float],
        noise_BKV: Tensor | None,
        threads: int,
    ) -> Tensor:
        """The tokens `[B, K]`, drawn as by the match rule; `INVALID` where logits are NaN or the largest is infinite.

        Args:
            logits_BKV: float32, before any correction.
            reads_BKX: `[B, K - 1, X]` float32; added to the memory at each position but the first. None of a Markov
                head.
            temperatures: of the rows; 0 is greedy.
            noise_BKV: float64; None if all rows are greedy.
            threads: most threads.
        """
        tokens_BK = torch.empty(logits_BKV.shape[:2], dtype=torch.long, device="cpu")
        places, kept = self._places(logits_BKV, reads_BKX, temperatures, noise_BKV)
        library().draw_chains(ctypes.byref(self._correction), ctypes.byref(places), tokens_BK.data_ptr(), threads)
        del kept
        return tokens_BK

    def trees(
        self,
        logits_BKV: Tensor,
        reads_BKX: Tensor | None,
        temperatures: Sequence[float],
        noise_BKV: Tensor | None,
        threads: int,
        *,
        number: int,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        """The tokens and the parents `[B, N]` of each row's likeliest nodes, best first, `ABSENT` after the last one.

        The likelihood of a token is the softmax of its scores, which are the logits divided by the temperature, plus
        noise. `number` is that of candidates after a node, `budget` is N; see `chains` for the others.
        """
        nodes = torch.empty(2, len(logits_BKV), budget, dtype=torch.long, device="cpu")
        places, kept = self._places(logits_BKV, reads_BKX, temperatures, noise_BKV)
        library().grow_corrected(
            ctypes.byref(self._correction), ctypes.byref(places), min(number, logits_BKV.shape[2]), budget,
            nodes[0].data_ptr(), nodes[1].data_ptr(), threads,
        )  # fmt: skip
        del kept
        return nodes[0], nodes[1]

    def _places(
        self, logits_BKV: Tensor, reads_BKX: Tensor | None, temperatures: Sequence[float], noise_BKV: Tensor | None
    ) -> tuple[Places, list[object]]:
        (B, K, V), correction = logits_BKV.shape, self._correction.correction
        assert correction.outputs == V and (reads_BKX is None) == (self._matrices[0] is None)
        assert reads_BKX is None or reads_BKX.shape == (B, K - 1, correction.inputs)
        assert noise_BKV is None or noise_BKV.shape[2] == V
        return places_of(logits_BKV, reads_BKX, temperatures, noise_BKV)

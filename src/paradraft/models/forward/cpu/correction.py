"""Drafts drawn token by token in C++ (`correction.cpp`), with logits corrected by the tokens drawn before.

Shape letters: B rows of a batch, K positions of a draft, V vocabulary, U ids that can be drafted, D hidden size, X rank
of the correction.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paradraft.models.forward.cpu.build import library
from paradraft.models.forward.cpu.drawing import Arguments, NativePathHead, PassOutputs, places_of
from paradraft.models.forward.cpu.matrix import Matrix, PackedMatrix
from paradraft.sampling.noise import rows_of


class _Correction(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("token", "memory", "correction")),
        *((name, ctypes.c_void_p) for name in ("embedding", "embedding_bfloat16")),
    )


class NativeCorrection(NativePathHead):
    """Draws drafts with a previous-token head, or with a Markov head, which has no `token` and no `memory`.

    It reads `[B, K - 1, X]` of the states, which is added to the memory at each position but the first; a Markov head
    nothing. Neither reads anchors.

    Args:
        embedding: `[rows, D]` in float32 or bfloat16; `[rows, X]` of a Markov head.
        token: E, `[X, D]`.
        memory: R, `[X, X]`.
        correction: W C, `[U, X]`.
        ids: `[U]`, increasing; None for all. Logits of others are not read.
    """

    CHAINS, TREES = "draw_chains", "grow_corrected"

    def __init__(
        self, embedding: Tensor, token: Tensor | None, memory: Tensor | None, correction: Tensor,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._ids_U, self._rows = ids, None if ids is None else rows_of(ids.numpy())
        self._embedding = (embedding if ids is None else embedding[ids]).detach().contiguous()
        is_bfloat16 = embedding.dtype == torch.bfloat16
        assert is_bfloat16 or embedding.dtype == torch.float32, "other numbers would be read as these"
        self._matrices = [None if weight is None else PackedMatrix([weight]) for weight in (token, memory, correction)]
        self._correction = _Correction(
            *(Matrix() if packed is None else packed.matrix for packed in self._matrices),
            None if is_bfloat16 else self._embedding.data_ptr(),
            self._embedding.data_ptr() if is_bfloat16 else None,
        )
        library()

    def chains(self, outputs: PassOutputs) -> Tensor:
        """See `NativePathHead`."""
        return self._ids_of(super().chains(self._with_ids(outputs)))

    def trees(self, outputs: PassOutputs, *, number: int, budget: int) -> tuple[Tensor, Tensor]:
        """See `NativePathHead`."""
        rows_BN, parents_BN = super().trees(self._with_ids(outputs), number=number, budget=budget)
        return self._ids_of(rows_BN), parents_BN

    def _with_ids(self, outputs: PassOutputs) -> PassOutputs:
        """The outputs with logits `[B, K, U]`."""
        if self._ids_U is None:
            return outputs
        ids_BKU = self._ids_U.expand(*outputs.logits.shape[:2], -1)
        return outputs._replace(logits=outputs.logits.gather(2, ids_BKU))  # `index_select` takes 15 times as long

    def _ids_of(self, rows: Tensor) -> Tensor:
        """The ids of the correction's rows; negative ones remain."""
        return rows if self._ids_U is None else self._ids_U[rows.clamp(min=0)].where(rows >= 0, rows)

    def _arguments(self, outputs: PassOutputs, *, is_tree: bool) -> Arguments:
        (B, K, V), reads, correction = outputs.logits.shape, outputs.reads, self._correction.correction
        assert correction.outputs == V and (reads is None) == (self._matrices[0] is None)
        assert reads is None or reads.shape == (B, K - 1, correction.inputs)
        noise, starts_BK = None, None
        if outputs.noise is not None and is_tree:
            noise = outputs.noise.of(None) if self._rows is None else outputs.noise.kept(self._rows)
        elif outputs.noise is not None:
            starts_BK = outputs.noise.starts
        places, kept = places_of(outputs, outputs.logits, noise, starts_BK, self._ids_U)
        return [ctypes.byref(self._correction), ctypes.byref(places)], [places, *kept]

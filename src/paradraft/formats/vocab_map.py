"""Reduced vocabulary of a draft model: its output head has rows for some of the target's ids alone.

Most of a small draft model's time goes into its output head, and a few of the ids make up nearly all text (VocabTrim,
Goel et al. 2025; FR-Spec, Zhao et al. 2025). Stored as in EAGLE-3 (Li et al. 2025) and the tools that train it
(SpecForge, speculators): beside the head's weights a tensor `d2t`, which holds for each row its target id minus the
row's index, and often `t2d`, which holds for each target id whether it has a row.

Shape letters: U rows of the head, V target ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

D2T, T2D = "d2t", "t2d"
"""Names of the stored tensors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabMap:
    """The target id of each row of a reduced output head.

    Args:
        to_target: `[U]` int64, increasing.

    >>> VocabMap(to_target=torch.tensor([0, 2])).spread(torch.tensor([1.5, 2.5]), 4).tolist()
    [1.5, -inf, 2.5, -inf]
    """

    to_target: Tensor

    def below(self, vocab_size: int, device: torch.device) -> VocabMap:
        """The map on a device without the ids from `vocab_size` on, which only pad the embedding."""
        return VocabMap(to_target=self.to_target[self.to_target < vocab_size].to(device))

    def spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The logits `[…, V]` of all ids from those of the rows `[…, U]`, -inf for ids without a row.

        So the rest of drafting has target ids only: noise, bias and penalties are those of the id, and q is 0 for ids
        without a row, which every verification rule allows.
        """
        logits = logits.narrow(-1, 0, len(self.to_target))
        whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return whole.scatter_(-1, self.to_target.expand_as(logits), logits)

    @classmethod
    def stored(cls, d2t: Tensor, t2d: Tensor | None, *, rows: int, vocabulary: int, name: str) -> VocabMap:
        """The map of a checkpoint.

        Args:
            d2t: `[U]` offsets: the id of row r is r + d2t[r].
            t2d: `[V]` whether an id has a row; None if it is not stored.
            rows: U, those of the output head.
            vocabulary: ids that the draft model can read: rows of its embedding.
            name: the checkpoint's, for messages.

        Raises:
            ValueError: the tensors do not fit each other, the head or the embedding.

        >>> VocabMap.stored(torch.tensor([0, 1, 1]), None, rows=3, vocabulary=4, name="draft").to_target.tolist()
        [0, 2, 3]
        """
        if d2t.shape != (rows,) or d2t.dtype.is_floating_point or d2t.dtype == torch.bool:
            raise ValueError(
                f"draft {name!r}: {D2T} is {d2t.dtype} of the shape {tuple(d2t.shape)}: it needs an integer for each "
                f"of the {rows} rows of the output head"
            )
        ids = d2t.long() + torch.arange(rows, device=d2t.device)
        if len(outside := ids[(ids < 0) | (ids >= vocabulary)]):
            raise ValueError(
                f"draft {name!r}: {D2T} names the token {int(outside[0])}, and its embedding has {vocabulary} rows"
            )
        if len(wrong := (ids.diff() <= 0).nonzero()[:, 0]):
            row = int(wrong[0])
            raise ValueError(
                f"draft {name!r}: {D2T} gives the rows {row} and {row + 1} of the output head the tokens "
                f"{int(ids[row])} and {int(ids[row + 1])}: they must increase"
            )
        if t2d is not None and not torch.equal(known := t2d.nonzero().flatten(), ids):
            differing = set(known.tolist()) ^ set(ids.tolist())
            raise ValueError(f"draft {name!r}: {D2T} and {T2D} disagree about the token {min(differing)}")
        return cls(to_target=ids)

"""Reduced vocabulary of a draft model: its output head has rows for some of the target's ids alone.

Most of a small draft model's time goes into its output head, and a few of the ids make up nearly all text (VocabTrim,
Goel et al. 2025; FR-Spec, Zhao et al. 2025). Stored as in EAGLE-3 (Li et al. 2025) and the tools that train it
(SpecForge, speculators): beside the head's weights a tensor `d2t`, which holds for each row its target id minus the
row's index, and often `t2d`, which holds for each target id whether it has a row.

Shape letters: U rows of the head, V target ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

D2T, T2D = "d2t", "t2d"
"""Names of the stored tensors."""


def ranked(counts_V: Tensor, always: Sequence[int] = ()) -> Tensor:
    """`[V]` ids in the order in which a reduced vocabulary takes them, see `VocabMap.of_counts`.

    Raises:
        ValueError: `always` has an id outside the vocabulary.

    >>> ranked(torch.tensor([0, 5, 2, 0, 9, 2, 0]), always=[6]).tolist()
    [6, 4, 1, 2, 5, 0, 3]
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.long, device=counts_V.device)
    if len(outside := kept[(kept < 0) | (kept >= len(counts_V))]):
        raise ValueError(f"token {int(outside[0])} is to be kept, and the vocabulary has {len(counts_V)}")
    by_count_V = counts_V.argsort(descending=True, stable=True)
    return torch.cat([kept, by_count_V[~torch.isin(by_count_V, kept)]])


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

    def rows_of(self, ids: Tensor) -> Tensor:
        """The head's rows of target ids `[…]`; -1 for ids without one.

        >>> VocabMap(to_target=torch.tensor([0, 2])).rows_of(torch.tensor([2, 1, 7, -100])).tolist()
        [1, -1, -1, -1]
        """
        rows = torch.searchsorted(self.to_target, ids).clamp(max=len(self.to_target) - 1)
        return torch.where(self.to_target[rows] == ids, rows, -1)

    def spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The logits `[…, V]` of all ids from those of the rows `[…, U]`, -inf for ids without a row.

        So the rest of drafting has target ids only: noise, bias and penalties are those of the id, and q is 0 for ids
        without a row, which every verification rule allows.
        """
        logits = logits.narrow(-1, 0, len(self.to_target))
        whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return whole.scatter_(-1, self.to_target.expand_as(logits), logits)

    @classmethod
    def of_counts(cls, counts_V: Tensor, *, size: int, always: Sequence[int] = ()) -> VocabMap:
        """The map of the most frequent ids of a text; of equally frequent ones the lower, so that the lowest ids fill
        the places of a text with fewer ids.

        Args:
            counts_V: `[V]` times that each id is in the text.
            size: U.
            always: ids that are kept whatever their counts.

        Raises:
            ValueError: `always` does not fit into `size`, or `size` not into V.

        Source: Goel et al. 2025 (VocabTrim), section 3; Li et al. 2025 (EAGLE-3), its code, for the order by id and the
        filling.

        >>> VocabMap.of_counts(torch.tensor([0, 5, 2, 0, 9, 2, 0]), size=4, always=[6]).to_target.tolist()
        [1, 2, 4, 6]
        """
        least, vocabulary = max(len(set(always)), 1), len(counts_V)
        if not least <= size <= vocabulary:
            ends = f" ({least} are always kept)" if least > 1 else ""
            raise ValueError(f"size={size}: use {least} to {vocabulary} tokens{ends}")
        return cls(to_target=ranked(counts_V, always)[:size].sort().values)

    def d2t(self) -> Tensor:
        """`[U]` int64 offsets, as they are stored: target id minus row.

        >>> VocabMap(to_target=torch.tensor([0, 2, 3])).d2t().tolist()
        [0, 1, 1]
        """
        return self.to_target - torch.arange(len(self.to_target), device=self.to_target.device)

    def t2d(self, vocabulary: int) -> Tensor:
        """`[V]` bool, as it is stored: whether an id has a row.

        >>> VocabMap(to_target=torch.tensor([0, 2])).t2d(4).tolist()
        [True, False, True, False]
        """
        has_row_V = torch.zeros(vocabulary, dtype=torch.bool, device=self.to_target.device)
        return has_row_V.index_fill(0, self.to_target, True)

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

"""Training samples: tokens, labels, and the split into training and held-out set."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from paradraft.wording import number_of

BEGAN, REFUSED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Tokens, and which of them are labels.

    Both are stored as arrays, of 32-bit integers and of bytes: lists take eight times as much, gigabytes for a large
    data set. Memory views are kept as they are, so that samples of a memory-mapped file take no memory.

    Args:
        tokens: at least two token ids.
        group: shared by pieces of one record and by answers to one prompt.
        weight: times that an epoch takes the sample; 0: it is held out.
        rounds: of each token whether a round of decoding began after it (`BEGAN`), and refused some of its draft
            (`REFUSED`); empty if unknown.
        least_round: drafts are trained after tokens with at least this value in `rounds`; 0: after all.
    """

    tokens: Sequence[int]
    is_label: Sequence[bool]
    group: int = field(default=0, compare=False)
    weight: float = field(default=1.0, compare=False)
    rounds: Sequence[int] = ()
    least_round: int = 0

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.is_label) and len(self.rounds) in (0, len(self.tokens))
        for name, kind in (("tokens", "i"), ("is_label", "b"), ("rounds", "b")):
            values = getattr(self, name)
            if isinstance(values, memoryview):
                assert values.format == kind
            else:
                object.__setattr__(self, name, array(kind, values))

    def may_draft(self, first: int = 0) -> np.ndarray:
        """`[n - 1]` whether drafts are trained after each token but the last: a label follows, and it is an anchor.

        Args:
            first: tokens from the place to the root of its round: 1 if the target's own token comes between.
        """
        is_label = np.asarray(self.is_label, dtype=np.bool_)[1:]
        if not self.least_round:
            return is_label
        is_anchor = np.asarray(self.rounds)[first:] >= self.least_round
        return is_label & np.pad(is_anchor, (0, first))[: len(is_label)]


def label_counts(samples: Iterable[Sample], vocab_size: int) -> Tensor:
    """`[V]` times that each id is a label.

    >>> label_counts([Sample(tokens=[1, 2, 2], is_label=[False, True, True])], 3).tolist()
    [0, 0, 2]
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        labels = np.asarray(sample.tokens)[np.asarray(sample.is_label, dtype=bool)]
        counts_V += np.bincount(labels, minlength=vocab_size)
    return torch.from_numpy(counts_V)


def group_of(record: Sample) -> int:
    """Group of all samples of a record, from its first sample: a hash of the prompt, or of all tokens without one.

    >>> answers = [Sample(tokens=[5, 6, answer], is_label=[False, False, True]) for answer in (7, 8)]
    >>> group_of(answers[0]) == group_of(answers[1])
    True
    """
    first = next((i for i, flag in enumerate(record.is_label) if flag), 0)
    return hash(tuple(record.tokens[: first or None]))


def is_longer(whole: Sample, max_length: int) -> bool:
    """Whether a sample has labels that do not fit into `max_length` tokens."""
    return _last_label(whole) >= max_length


def truncated(whole: Sample, max_length: int, *, group: int) -> Iterable[Sample]:
    """Truncates a sample to `max_length` and its last label there; returns nothing if it has no label there.

    >>> whole = Sample(tokens=[5, 6, 7, 8, 9, 1], is_label=[False, True, True, True, True, False])
    >>> [list(piece.tokens) for piece in truncated(whole, 3, group=0)]
    [[5, 6, 7]]
    """
    start = slice(max_length)
    first = replace(whole, tokens=whole.tokens[start], is_label=whole.is_label[start], rounds=whole.rounds[start])
    return pieces(first, max_length, group=group)


def pieces(whole: Sample, max_length: int, *, group: int) -> Iterable[Sample]:
    """Splits a sample, up to its last label, into pieces that have a label.

    Pieces overlap by one token, because the first token of a piece is never predicted.

    >>> whole = Sample(tokens=[5, 6, 7, 8, 9, 1], is_label=[False, True, True, True, True, False])
    >>> [list(piece.tokens) for piece in pieces(whole, 3, group=0)]
    [[5, 6, 7], [7, 8, 9]]
    """
    last = _last_label(whole)
    for start in range(0, last, max_length - 1):
        piece = slice(start, min(start + max_length, last + 1))
        if any(whole.is_label[piece][1:]):
            yield replace(
                whole,
                tokens=whole.tokens[piece],
                is_label=whole.is_label[piece],
                rounds=whole.rounds[piece],
                group=group,
            )


def _last_label(whole: Sample) -> int:
    """Index of the last label; 0 without labels."""
    return max((i for i, flag in enumerate(whole.is_label) if flag), default=0)


def prompt_of(sample: Sample, *, most: int) -> list[int]:
    """Prompt of a sample: the tokens before its first label; of plain text the first `most`, but at most half.

    >>> prompt_of(Sample(tokens=[5, 6, 7, 8], is_label=[False, False, True, True]), most=1)
    [5, 6]
    >>> prompt_of(Sample(tokens=[5, 6, 7, 8], is_label=[True] * 4), most=9)
    [5, 6]
    """
    first = list(sample.is_label).index(True)
    return list(sample.tokens[: first or max(min(most, len(sample.tokens) // 2), 1)])


SHARE, MOST = 20, 64
"""Default size of the held-out set: one in `SHARE` samples, at most `MOST`."""
LARGE = 10
"""A group with more than one in `LARGE` of all samples is never held out."""


def hold_out(samples: list[Sample], wanted: int | None) -> tuple[list[Sample], list[Sample]]:
    """Splits samples into training and held-out set: those with weight 0, if any.

    Else samples of one `group` go to the same side; surplus samples of a held-out group are dropped. If there are too
    few groups for that, or too large ones, as in a single long text, each sample is a group.

    Args:
        samples: all, in the order of the data.
        wanted: size of the held-out set; by default one in `SHARE`, or all with weight 0, at most `MOST`.

    Returns:
        Training samples, and held-out samples, those of different groups first.

    Raises:
        ValueError: no training sample would be left, or fewer have weight 0.
    """
    if aside := [sample for sample in samples if not sample.weight]:
        if len(aside) == len(samples):
            raise ValueError("weight=0 in all data leaves nothing to learn: leave it out of one")
        if wanted is not None and wanted > len(aside):
            raise ValueError(f"held_out={wanted}: the data with weight=0 has {number_of(len(aside), 'sample')}")
        return [sample for sample in samples if sample.weight], aside[: MOST if wanted is None else wanted]
    size = min(len(samples) // SHARE, MOST) if wanted is None else wanted
    if size >= len(samples):
        raise ValueError(f"held_out={size} leaves nothing to learn of {len(samples)} samples: hold out fewer")
    chosen = _spread(_groups(samples), size) or _spread([[index] for index in range(len(samples))], size)
    # The n-th group starts with its n-th sample, because texts begin alike.
    ranked = sorted(
        ((i - nth) % len(group), index) for nth, group in enumerate(chosen) for i, index in enumerate(group)
    )
    out = {index for _, index in ranked}
    return (
        [sample for index, sample in enumerate(samples) if index not in out],
        [samples[index] for _, index in ranked[:size]],
    )


def _groups(samples: list[Sample]) -> list[list[int]]:
    """Sample indices of each group that is not too large."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    return [group for group in groups.values() if len(group) * LARGE <= len(samples)]


def _spread(groups: list[list[int]], number: int) -> list[list[int]]:
    """Chooses evenly spaced groups with at least `number` samples in total.

    Takes one group in `SHARE`, more if needed, but never all; returns none if that is not enough.

    >>> _spread([[0], [1], [2], [3], [4], [5]], 2)
    [[1], [4]]
    >>> _spread([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 2)
    [[3, 4, 5]]
    """
    count = min(number, max(len(groups) // SHARE, 1))
    while count < len(groups):
        chosen = [groups[round((i + 0.5) * len(groups) / count - 0.5)] for i in range(count)]
        total = sum(map(len, chosen))
        if total >= number:
            return chosen
        # Estimated from the mean size so far; adding groups one by one would take quadratic time.
        count = max(count + 1, count * number // max(total, 1))
    return []

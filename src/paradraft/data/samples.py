"""Training samples: their tokens, which of them are predicted, and the split into training and held-out samples."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Tokens, and which of them are to be predicted.

    Both are kept as arrays, of 32-bit integers and of bytes: a list takes eight times as much, gigabytes for a large
    data set. Views of such memory are kept as they are, so that samples of a file that is mapped take none.

    Args:
        tokens: at least two token ids.
        is_label: for each token whether it is a label.
        group: samples of one group are pieces of one record, or answers to one prompt.
        weight: how many times an epoch takes it.
    """

    tokens: Sequence[int]
    is_label: Sequence[bool]
    group: int = field(default=0, compare=False)
    weight: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.is_label)
        for name, kind in (("tokens", "i"), ("is_label", "b")):
            given = getattr(self, name)
            if isinstance(given, memoryview):
                assert given.format == kind
            else:
                object.__setattr__(self, name, array(kind, given))


def group_of(record: Sample) -> int:
    """The group of all that is made of a record, whose first sample this is: by its prompt; where all is learnt by all.

    >>> answers = [Sample(tokens=[5, 6, answer], is_label=[False, False, True]) for answer in (7, 8)]
    >>> group_of(answers[0]) == group_of(answers[1])
    True
    """
    first = next((place for place, flag in enumerate(record.is_label) if flag), 0)
    return hash(tuple(record.tokens[: first or None]))


def is_longer(whole: Sample, max_length: int) -> bool:
    """Whether a sample has labels that do not fit into `max_length` tokens."""
    return _last_label(whole) >= max_length


def truncated(whole: Sample, max_length: int, *, group: int) -> Iterable[Sample]:
    """The beginning of a sample, up to its last label in it; none where there is no label in it.

    >>> whole = Sample(tokens=[5, 6, 7, 8, 9, 1], is_label=[False, True, True, True, True, False])
    >>> [list(piece.tokens) for piece in truncated(whole, 3, group=0)]
    [[5, 6, 7]]
    """
    first = replace(whole, tokens=whole.tokens[:max_length], is_label=whole.is_label[:max_length])
    return pieces(first, max_length, group=group)


def pieces(whole: Sample, max_length: int, *, group: int) -> Iterable[Sample]:
    """Pieces of a sample that have a label, up to its last one; they overlap by one token, or a piece's first token
    would belong to no group.

    >>> whole = Sample(tokens=[5, 6, 7, 8, 9, 1], is_label=[False, True, True, True, True, False])
    >>> [list(piece.tokens) for piece in pieces(whole, 3, group=0)]
    [[5, 6, 7], [7, 8, 9]]
    """
    last = _last_label(whole)
    for start in range(0, last, max_length - 1):
        piece = slice(start, min(start + max_length, last + 1))
        if any(whole.is_label[piece][1:]):
            yield Sample(tokens=whole.tokens[piece], is_label=whole.is_label[piece], group=group)


def _last_label(whole: Sample) -> int:
    """The place of the last label; 0 where there is none."""
    return max((place for place, flag in enumerate(whole.is_label) if flag), default=0)


SHARE, MOST = 20, 64
"""By default one sample in so many is measured on, and at most so many."""
LARGE = 10
"""A text or prompt with more than one in so many of all samples is never kept out."""


def hold_out(samples: list[Sample], wanted: int | None) -> tuple[list[Sample], list[Sample]]:
    """Chooses samples to measure on.

    Samples of one `group` go to the same side; those of a group that is kept out which are not wanted are dropped.
    Where groups are too few for that, or too large, as in a single long text, each sample stands for itself.

    Args:
        samples: all, in the order of the data.
        wanted: how many to measure on; by default one in `SHARE`, at most `MOST`.

    Returns:
        The samples to learn, and those to measure on, of different groups first.

    Raises:
        ValueError: nothing would be left to learn.
    """
    number = min(len(samples) // SHARE, MOST) if wanted is None else wanted
    if number >= len(samples):
        raise ValueError(f"held_out={number} leaves nothing to learn of {len(samples)} samples: hold out fewer")
    chosen = _spread(_groups(samples), number) or _spread([[index] for index in range(len(samples))], number)
    # Each group begins with another of its samples, because texts begin alike.
    ranked = sorted(
        ((place - nth) % len(group), index) for nth, group in enumerate(chosen) for place, index in enumerate(group)
    )
    out = {index for _, index in ranked}
    return (
        [sample for index, sample in enumerate(samples) if index not in out],
        [samples[index] for _, index in ranked[:number]],
    )


def _groups(samples: list[Sample]) -> list[list[int]]:
    """The indices of each group that is not too large."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    return [group for group in groups.values() if len(group) * LARGE <= len(samples)]


def _spread(groups: list[list[int]], number: int) -> list[list[int]]:
    """Groups with at least `number` samples, far from each other in the data: one in `SHARE`, or more if it takes more,
    but not all; none if that is not enough.

    >>> _spread([[0], [1], [2], [3], [4], [5]], 2)
    [[1], [4]]
    >>> _spread([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 2)
    [[3, 4, 5]]
    """
    count = min(number, max(len(groups) // SHARE, 1))
    while count < len(groups):
        chosen = [groups[round((place + 0.5) * len(groups) / count - 0.5)] for place in range(count)]
        found = sum(map(len, chosen))
        if found >= number:
            return chosen
        # As many as it takes if the others are as large; one by one it would take as long as there are groups.
        count = max(count + 1, count * number // max(found, 1))
    return []

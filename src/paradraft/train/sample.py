"""A training sample: tokens, and which of them are to be predicted."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Tokens, and which of them are to be predicted.

    Both are kept as arrays, of 32-bit integers and of bytes: a list takes eight times as much, gigabytes for a large
    data set.

    Args:
        tokens: at least two token ids.
        is_label: for each token whether it is a label.
        group: samples of one group are pieces of one record, or answers to one prompt.
    """

    tokens: Sequence[int]
    is_label: Sequence[bool]
    group: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.is_label)
        object.__setattr__(self, "tokens", array("i", self.tokens))
        object.__setattr__(self, "is_label", array("b", self.is_label))


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
    would be nobody's.

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

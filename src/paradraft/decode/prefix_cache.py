"""Prefix cache: the state of finished requests, for prompts that begin with the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paradraft.models.cached_rows import SavedRow


@dataclass(frozen=True, kw_only=True)
class CachedRow:
    """The state of a finished request.

    Args:
        tokens: prompt and answer.
        target: its row of the target's KV cache.
        drafter: see `Drafter.save`.
    """

    tokens: list[int]
    target: SavedRow
    drafter: Any


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The first `length` tokens of a cached row, with which a prompt begins too."""

    row: CachedRow
    length: int


class PrefixCache:
    """The last `rows` finished requests."""

    def __init__(self, rows: int) -> None:
        self.keeps_any = rows > 0
        self._rows = deque[CachedRow](maxlen=rows)

    def add(self, row: CachedRow) -> None:
        """Adds a row; the oldest leaves if there are too many."""
        self._rows.append(row)

    def longest(self, tokens: Sequence[int]) -> Prefix | None:
        """The longest cached prefix of a prompt; None if no row begins with its first token."""
        lengths = [shared_length(row.tokens, tokens) for row in self._rows]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=0)
        return Prefix(row=self._rows[best], length=lengths[best]) if lengths and lengths[best] else None


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix.

    >>> shared_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(first, second, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second)))

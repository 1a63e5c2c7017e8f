"""The shape of draft trees; [parents.py](parents.py) has the tensors of a drafted tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paradraft.errors import one_line, whole_number

ABSENT = -1
"""Padding of token ids and node indices. Never 0, which is a real token."""
MOST_CANDIDATES = 16
"""Most children of a node."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The shape of draft trees: a node budget or fixed paths.

    A path names a node by the rank of the candidate taken at each depth: `(0,)` is the drafter's best first token,
    `(0, 1)` the second best after it.

    Args:
        budget: grow each draft to this many nodes, the most probable first; at least 1.
        paths: nodes of every draft; the parent of each path must be among them.
        max_depth: most tokens of a path of a tree with a budget; None leaves that to K.

    Raises:
        ValueError: there is no budget and no paths, or both; a path is empty, repeated or without its parent; or fixed
            paths come with a depth.

    >>> Tree(paths=((0,), (1,), (0, 0))).depth
    2
    """

    budget: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.paths is None):
            raise ValueError("a tree has either a budget or paths")
        if self.max_depth is not None:
            object.__setattr__(self, "max_depth", whole_number("depth of a tree", self.max_depth))
        if self.max_depth is not None and (self.paths is not None or self.max_depth < 1):
            raise ValueError(f"depth of a tree {self.max_depth}: use at least 1, and none beside paths")
        if self.budget is not None:
            object.__setattr__(self, "budget", whole_number("tree budget", self.budget))
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"tree budget {self.budget}: use at least 1 node")
        if self.paths is not None:
            object.__setattr__(self, "paths", _whole_paths(self.paths))
            known = set(self.paths)
            if len(known) < len(self.paths) or not self.paths:
                raise ValueError("tree paths: name at least one, and each only once")
            for path in self.paths:
                if not path or min(path) < 0 or max(path) >= MOST_CANDIDATES:
                    raise ValueError(f"tree path {path}: use ranks from 0 to {MOST_CANDIDATES - 1}, at least one")
                if path[:-1] and path[:-1] not in known:
                    raise ValueError(f"tree path {path} is there without its parent {path[:-1]}: add it")
            # By depth, then rank: parents come before children, better siblings before worse ones.
            object.__setattr__(self, "paths", tuple(sorted(known, key=lambda path: (len(path), path))))

    @property
    def nodes(self) -> int:
        """Most nodes of a draft."""
        return len(self.paths or ()) if self.budget is None else self.budget

    @property
    def depth(self) -> int | None:
        """Most tokens of a path; None if only K bounds it."""
        return self.max_depth if self.paths is None else max(map(len, self.paths))


def _whole_paths(paths: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(paths, Iterable) or isinstance(paths, str | bytes):
        raise ValueError(f"tree paths {one_line(paths)}: use paths such as ((0,), (1,), (0, 0))")
    for path in (paths := tuple(paths)):
        if not isinstance(path, Iterable) or isinstance(path, str | bytes):
            raise ValueError(f"tree path {one_line(path)}: use ranks such as (0, 1)")
    return tuple(tuple(whole_number("rank of a tree path", rank) for rank in path) for path in paths)

"""How to speculate: which drafter, how much it drafts in a round, and how its drafts are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paradraft.decode.draft_length import POLICIES
from paradraft.drafters import branches, check_draft, drafter_config
from paradraft.errors import one_line, whole_number
from paradraft.models.presets import check_has_weights
from paradraft.tree import Tree
from paradraft.verify import RULES

MOST_DRAFTED = 256
"""Largest K; caches keep room for two drafts of that length."""
MOST_NODES = 1024
"""Largest tree of a draft."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How text is drafted and verified; checked as far as that needs no models.

    Args:
        drafter: one of `drafter_names()`, with settings if wanted, such as "ngram:max_ngram=5"; "none" decodes plainly.
            An `Engine` is given the drafter itself, so that one that was built by hand needs no name here.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round, one after the other, 1 to 256.
        tree: the shape of drafts that branch; None drafts chains.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same distribution and accepts
            more when sampling.
        lengths: how many of the k tokens to draft: "fixed" all, "heuristic" more after success, "confidence" while the
            drafter is sure, "expected" what pays on this machine.

    Raises:
        ValueError: a name or a setting of the drafter is unknown, a number is out of range, or a path of the tree is
            deeper than k.

    >>> Speculation(drafter="ngram", k=4, tree=Tree(budget=6)).nodes
    6
    """

    drafter: str = "none"
    draft: str | None = None
    k: int = 8
    tree: Tree | None = None
    verify: str = "match"
    lengths: str = "fixed"

    def __post_init__(self) -> None:
        for name in ("drafter", "verify", "lengths"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name}={one_line(value)}: use a name")
        drafter_config(self.drafter, self.draft)
        object.__setattr__(self, "k", whole_number("k", self.k))
        if not 1 <= self.k <= MOST_DRAFTED:
            raise ValueError(f"k={self.k}: draft 1 to {MOST_DRAFTED} tokens per round")
        if self.verify not in RULES:
            raise ValueError(f"verify={self.verify!r}: use one of {', '.join(RULES)}")
        if self.lengths not in POLICIES:
            raise ValueError(f"lengths={self.lengths!r}: use one of {', '.join(POLICIES)}")
        if self.tree is not None:
            if not isinstance(self.tree, Tree):
                raise ValueError(f"tree={one_line(self.tree)}: use a Tree, such as Tree(budget=12)")
            if self.tree.nodes > MOST_NODES:
                raise ValueError(f"a tree of {self.tree.nodes} nodes: use at most {MOST_NODES}")
            if self.tree.depth is not None and self.tree.depth > self.k:
                raise ValueError(
                    f"a tree path is {self.tree.depth} tokens deep, but k={self.k}: raise k or shorten the path"
                )

    @property
    def nodes(self) -> int:
        """Most tokens of a draft."""
        return self.k if self.tree is None else self.tree.nodes

    @property
    def depth(self) -> int:
        """Most tokens of a path of a draft."""
        return self.k if self.tree is None else min(self.k, self.tree.depth or self.tree.nodes)

    @property
    def pass_width(self) -> int:
        """Most tokens of a pass that reads a whole round and drafts the next, or reads a whole tree; at least 64."""
        return max(64, 2 * self.k + 2, self.nodes + 1)

    def check_models(self, target: str) -> None:
        """Raises ValueError, before anything is loaded, if the drafter cannot draft like this for a target.

        Args:
            target: a Hugging Face id, a folder, or "pocket".
        """
        check_draft(self.drafter, self.draft, target)
        for name in (target, self.draft or ""):
            check_has_weights(name)
        self.check_branching("tree" if branches(self.drafter) else "chain")

    def check_branching(self, branching: Literal["chain", "spine", "tree"]) -> None:
        """Raises ValueError if drafts have a shape that a drafter cannot draft; see `Drafter.branching`."""
        if self.tree is None:
            return
        if branching == "chain":
            raise ValueError("this drafter drafts chains only: leave the tree out")
        aside = [path for path in self.tree.paths or () if any(path[:-1])]
        if aside and branching == "spine":
            raise ValueError(f"tree path {aside[0]}: this drafter branches from its best tokens only, remove it")

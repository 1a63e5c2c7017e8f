"""Speculation settings: drafter, draft length and tree, verification rule, drafting ahead."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from paradraft.drafters import check_draft, drafter_class, drafter_config, drafter_names, split_settings
from paradraft.errors import one_line, whole_number
from paradraft.models.names import check_has_weights
from paradraft.tree import Tree
from paradraft.verify import Rule, check_rule_name, load_rule, rule_class

if TYPE_CHECKING:
    from paradraft.core import Drafter
    from paradraft.models.target import Target

MOST_DRAFTED = 256
"""Largest K; caches reserve slots for two drafts of that length."""
AUTO = "auto"
LENGTHS = (AUTO, "fixed", "heuristic", "confidence", "expected")
"""`AUTO`, and the names of `paradraft.decode.lengths.draft_length.POLICIES`."""
OVERLAPS = ("both", "pre", "post")
MOST_NODES = 1024
"""Most nodes of a draft tree."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Settings of drafting and verification, checked as far as possible without models.

    Args:
        drafter: one of `drafter_names()`, with settings if wanted, such as "ngram:max_ngram=5"; "none" decodes plainly;
            several joined by `+`, such as "ngram+pard", draft one tree; "auto" is replaced before models are loaded
            (`paradraft.engine.automatic`). An `Engine` gets the drafter itself, so a drafter built by hand needs no
            name here.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round (depth of the draft), 1 to 256. A drafter whose settings fix its trees
            (`Drafter.tree`) sets it to their depth.
        tree: shape of draft trees; None drafts chains, or the trees that the drafter's settings fix.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same distribution and accepts
            more when sampling, and "block" again more; "typical" and "judge:head=FILE" are not lossless.
        lengths: draft length policy: "fixed" drafts all k tokens, "heuristic" more after success, "confidence" while
            the drafter is sure, "expected" the fastest length on this machine. "auto" is "expected" where it cannot
            change a text, else "fixed": see `settled`.
        gamma: γ of PEARL: draft while the target verifies, this many tokens ahead; "auto" takes the fastest number
            here, at most k; None drafts and verifies in turn. Chains and the match rule only. See
            `paradraft.decode.pearl.pearl`.
        overlap: PEARL's strategies: "pre" verifies the first token of a window while it is drafted, "post" drafts while
            the previous window is verified, "both".
        reason: why "auto" chose the drafter, for users; None if they did.

    Raises:
        ValueError: a name or a setting of the drafter is unknown, a number is out of range, a path of the tree is
            deeper than k, or a tree is set for a drafter whose settings fix its trees.

    >>> Speculation(drafter="ngram", k=4, tree=Tree(budget=6)).nodes
    6
    >>> Speculation(drafter="lookahead:ngram=3:window=4:guesses=2").k
    5
    """

    drafter: str = "none"
    draft: str | None = None
    k: int = 8
    tree: Tree | None = None
    verify: str = "match"
    lengths: str = AUTO
    gamma: int | Literal["auto"] | None = None
    overlap: str = "both"
    reason: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("drafter", "verify", "lengths"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name}={one_line(value)}: use a name")
        name, settings = split_settings(self.drafter)
        object.__setattr__(self, "drafter", ":".join([name, *settings]))
        object.__setattr__(self, "k", whole_number("k", self.k))
        if not 1 <= self.k <= MOST_DRAFTED:
            raise ValueError(f"k={self.k}: draft 1 to {MOST_DRAFTED} tokens per round")
        check_rule_name(self.verify)
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths={self.lengths!r}: use one of {', '.join(LENGTHS)}")
        if self.tree is not None and not isinstance(self.tree, Tree):
            raise ValueError(f"tree={one_line(self.tree)}: use a Tree, such as Tree(budget=12)")
        # Last the imports of torch: the modules of drafter and rule.
        config = None if self.drafter == AUTO else drafter_config(self.drafter, self.draft)
        load_rule(self.verify)
        if config is None and self.gamma is not None:
            raise ValueError(f"gamma={self.gamma}: name the drafter that drafts ahead")
        self._check_gamma()
        if config is None:
            return
        fixed_tree: Tree | None = getattr(config, "tree", None)
        if fixed_tree is not None:
            _check_no_other(self.tree, fixed_tree)
            object.__setattr__(self, "tree", fixed_tree)
            object.__setattr__(self, "k", fixed_tree.depth or self.k)
        if self.nodes > MOST_NODES:
            raise ValueError(f"a tree of {self.nodes} nodes: use at most {MOST_NODES}")
        paths = () if self.tree is None else self.tree.paths or ()
        if (deepest := max(map(len, paths), default=0)) > self.k:
            raise ValueError(f"a tree path is {deepest} tokens deep, but k={self.k}: raise k or shorten the path")

    def _check_gamma(self) -> None:
        if self.overlap not in OVERLAPS:
            raise ValueError(f"overlap={one_line(self.overlap)}: use one of {', '.join(OVERLAPS)}")
        if self.gamma is None:
            if self.overlap != "both":
                raise ValueError(f"overlap={self.overlap!r} is for drafting ahead: set gamma too")
            return
        if self.gamma == "auto" and self.k < 2:
            raise ValueError(f"gamma='auto' drafts at most k tokens ahead, and at least 2: k={self.k} is too few")
        if self.gamma != "auto":
            object.__setattr__(self, "gamma", gamma := whole_number("gamma", self.gamma))
            if not 2 <= gamma <= MOST_DRAFTED:
                raise ValueError(f"gamma={gamma}: draft 2 to {MOST_DRAFTED} tokens ahead, or auto")
            object.__setattr__(self, "k", gamma)
        if not drafter_class(self.drafter).traits.can_run_ahead:
            able = " or ".join(name for name in drafter_names() if drafter_class(name).traits.can_run_ahead)
            raise ValueError(f"gamma={self.gamma}: drafter {self.drafter!r} cannot draft ahead, use {able}")
        for name, allowed in (("verify", ("match",)), ("lengths", ("fixed", AUTO)), ("tree", (None,))):
            if (value := getattr(self, name)) not in allowed:
                fix = "leave the tree out" if name == "tree" else f"use {name}={allowed[0]!r}"
                raise ValueError(f"gamma={self.gamma} with {name}={one_line(value)}: {fix} to draft ahead")

    @property
    def nodes(self) -> int:
        """Most tokens of a draft, over all branches."""
        return self.nodes_of(drafter_class(self.drafter))

    def nodes_of(self, drafter: Drafter | type[Drafter]) -> int:
        """`nodes` with another drafter or drafter class."""
        shape = drafter.traits.shape(self.tree, self.k)
        return self.k if shape is None else shape.nodes

    @property
    def depth(self) -> int:
        """Most tokens on one path of a draft."""
        return self.k if self.tree is None else min(self.k, self.tree.depth or self.tree.nodes)

    @property
    def pass_width(self) -> int:
        """Widest pass in tokens, at least 64: a round plus the next draft, or a tree."""
        return max(64, 2 * self.k + 2, self.nodes + 1)

    def check_models(self, target: str) -> None:
        """Raises ValueError, before weights are loaded, if the drafter cannot draft like this for a target."""
        check_draft(self.drafter, self.draft, target)
        for name in (target, self.draft or ""):
            check_has_weights(name)
        self.check_drafter(drafter_class(self.drafter))

    def check_drafter(self, drafter: Drafter | type[Drafter]) -> None:
        """Raises ValueError if a drafter or drafter class does not support this rule, tree or gamma."""
        if drafter.traits.needs_drawn and rule_class(self.verify).draws != "noise":
            raise ValueError(
                f"verify={self.verify!r}: this drafter learns from the target's own draws, which this rule does not "
                "have: use verify='match'"
            )
        if self.gamma is not None and not drafter.traits.can_run_ahead:
            raise ValueError(f"gamma={self.gamma}: this drafter cannot draft ahead, leave gamma out")
        if drafter.traits.has_drawing_part and rule_class(self.verify).draws == "numbers":
            raise ValueError(
                f"verify={self.verify!r}: drafters joined by + do not draw from one distribution, which this rule "
                "needs: use verify='match', or one drafter"
            )
        if self.tree is None:
            return
        if drafter.traits.branching == "chain":
            raise ValueError("this drafter drafts chains only: leave the tree out")
        off_spine = [path for path in self.tree.paths or () if any(path[:-1])]
        if off_spine and drafter.traits.branching == "spine":
            raise ValueError(f"tree path {off_spine[0]}: this drafter branches from its best tokens only, remove it")

    def settled(self, *, drafts: bool, is_exact: bool) -> Speculation:
        """Replaces the length policy "auto".

        "expected" makes draft lengths depend on measured times, so it is chosen only where they cannot change a text:
        with the match rule and logits that are bitwise equal in passes of any width. Elsewhere the same seed might give
        another text each time; such passes are also compiled for some widths only. Drafting ahead and plain decoding
        do not use it.

        Args:
            drafts: whether the drafter proposes anything.
            is_exact: whether all passes of the target are bitwise equal at any width; those in C++ are.
        """
        if self.lengths != AUTO:
            return self
        is_free = is_exact and rule_class(self.verify).same_tokens and self.gamma is None
        return replace(self, lengths="expected" if is_free and drafts else "fixed")

    @property
    def instead(self) -> tuple[str, ...]:
        """Options to try if drafting does not pay; the last is for a drafter that is hardly ever accepted."""
        other = "drafting in turns, without --gamma" if self.gamma is not None else "--lengths expected"
        return (other, "--drafter none") if self.lengths != "expected" else ("--drafter none",)

    def fitted_to(self, drafter: Drafter) -> Speculation:
        """Takes over the tree that a drafter's settings fix (`Drafter.tree`); raises ValueError if another is set."""
        if drafter.tree is None:
            return self
        _check_no_other(self.tree, drafter.tree)
        return replace(self, tree=drafter.tree, k=drafter.tree.depth or self.k)

    def swapped(self, before: Drafter, after: Drafter, draft: str) -> Speculation:
        """The settings with another draft; raises ValueError if its drafter does not draft as the one before."""
        facts, others = (
            (each.traits, each.tree, each.max_k, each.reserved_tokens, each.hidden_layers, each.likeliest)
            for each in (before, after)
        )
        if facts != others:
            raise ValueError(f"draft={draft!r} does not draft as {self.draft!r} does: load an engine with it")
        return replace(self, draft=draft)

    def checked_rule(self, target: Target, drafter: Drafter) -> Rule:
        """The verification rule; raises ValueError if target or drafter cannot speculate like this."""
        most = target.lm.width - 1
        if self.k > most:
            raise ValueError(f"k={self.k}: draft 1 to {most} tokens per round")
        if (own := drafter.max_k) is not None and self.k > own:
            raise ValueError(f"k={self.k}: this drafter drafts at most {own} tokens per round, set k={own}")
        self.check_drafter(drafter)
        rule = load_rule(self.verify)
        rule.check(target)
        if rule.warning is not None:
            warnings.warn(f"verify={self.verify!r}: {rule.warning}", stacklevel=3)
        if (nodes := self.nodes_of(drafter)) > most:
            raise ValueError(f"a tree of {nodes} nodes: a pass has room for {most}")
        return rule


def gamma_of(text: str | None) -> int | Literal["auto"] | None:
    """Parses γ of an option or of a method's spec: a whole number or "auto", else ValueError."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"gamma={text!r}: use a whole number of at least 2, or auto")
    return int(text)


def _check_no_other(tree: Tree | None, fixed_tree: Tree) -> None:
    if tree not in (None, fixed_tree):
        raise ValueError("this drafter's own settings say how large its trees are: leave the tree out")

"""Several drafters whose drafts are merged into one tree, written `a+b`, such as `ngram+pard`.

The target reads the nodes of all parts in one pass. Under the match rule the text does not depend on the draft. The
rejection rule needs the distribution of a sibling given those before it, which may be another part's, so it refuses
unions with a part that draws. Parts that all estimate the values of their nodes choose them from the text alone: their
unions are exact under any rule, and the length policy cuts them by the largest value of each node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.drafters import built_class, setting_of_part
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.traits import Traits
from paradraft.tree import ABSENT
from paradraft.union import merged


class Composite(Drafter):
    """Drafts the union of the drafts of its parts, which all draft in every round.

    Parts draft chains, at most K tokens each. If all of them estimate, they draft trees, and the union has the nodes of
    largest value. A part that drafts at most `max_k` is asked for no more.

    Raises:
        ValueError: a part decides the size of its drafts, see `traits_of_union`.
    """

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.traits = traits_of_union([type(part).__name__ for part in parts], [part.traits for part in parts])
        self.parts = tuple(parts)
        depths = [part.max_k for part in parts]
        self.max_k = None if None in depths else max(depth for depth in depths if depth is not None)
        self.hidden_layers = tuple(dict.fromkeys(layer for part in parts for layer in part.hidden_layers))
        self.reserved_tokens = tuple(dict.fromkeys(token for part in parts for token in part.reserved_tokens))
        self.models = tuple(model for part in parts for model in part.models)
        self.likeliest = max(part.likeliest for part in parts)
        self._drafts: list[Draft] = []
        """The last drafts of the parts, if one needs what the target has drawn after its nodes."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._drafts, self._tree = [], drafting.tree
        chains = dataclasses.replace(drafting, tree=None)
        for part in self.parts:
            part.start(drafting if part.traits.branching == "tree" else chains, device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.join(requests, prompt)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """The union of the parts' drafts."""
        drafts = [
            part.propose(lengths if part.max_k is None else [min(length, part.max_k) for length in lengths])
            for part in self.parts
        ]
        if self.traits.needs_drawn:
            self._drafts = drafts
            return Draft.union(*drafts)
        drafts = [draft for draft in drafts if draft.tokens.shape[1]] or drafts[:1]
        return drafts[0] if len(drafts) == 1 else Draft.union(*drafts, shape=self._tree)

    def commit(self, new: Committed) -> None:
        """Adds the committed tokens to all parts, and for each what the target has drawn after its own nodes."""
        for index, part in enumerate(self.parts):
            has_own = part.traits.needs_drawn and new.drawn is not None and self._drafts
            part.commit(dataclasses.replace(new, drawn=self._drawn_after(index, new)) if has_own else new)

    def _drawn_after(self, index: int, new: Committed) -> list[list[int]]:
        """For each row the target's tokens after the root and after the nodes of a part."""
        assert new.drawn is not None
        tokens, parents = (
            zip(*parts, strict=True) for parts in zip(*(draft.lists for draft in self._drafts), strict=True)
        )
        rows = []
        for tree_tokens, tree_parents, drawn in zip(tokens, parents, new.drawn, strict=True):
            nodes = merged(tree_tokens, tree_parents)[2][index]
            known = dict(enumerate(drawn, start=-1))  # by node; nodes that were cut off are not in it
            rows.append([drawn[0], *(known.get(node, ABSENT) if node >= 0 else ABSENT for node in nodes)])
        return rows

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.keep(rows)

    def save(self, row: int, most: int) -> list[Any]:
        """The saved rows of all parts."""
        return [part.save(row, most) for part in self.parts]

    def restore(self, row: int, saved: list[Any], shared: int) -> None:
        """See `Drafter`."""
        for part, of_part in zip(self.parts, saved, strict=True):
            part.restore(row, of_part, shared)

    def close(self) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.close()


def traits_of_union(names: Sequence[str], traits: Sequence[Traits]) -> Traits:
    """The traits of a union.

    Raises:
        ValueError: a part decides the size of its drafts itself. Its tree then cannot be a chain of K tokens, and may
            hold prompt tokens, which only it can read.
    """
    for name, each in zip(names, traits, strict=True):
        if each.branching == "own":
            raise ValueError(f"drafter {name!r} decides the size of its drafts itself, so it cannot be joined by +")
    estimates = all(each.estimates for each in traits)
    return Traits(
        label=" + ".join(each.label or name for name, each in zip(names, traits, strict=True)),
        words="their drafts in one tree",
        branching="tree" if estimates else "chain",
        needs_drawn=any(each.needs_drawn for each in traits),
        estimates=estimates,
        depends_on_rounds=any(each.depends_on_rounds for each in traits),
        needs_grammar=all(each.needs_grammar for each in traits),
        parts=sum(each.parts for each in traits),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a union; a subclass has the settings of the parts as its fields, see `setting_of_part`."""

    modules: ClassVar[dict[str, ModuleType]]
    """The modules of the parts, by name."""

    def __post_init__(self) -> None:
        self._class()  # which checks the parts

    @property
    def configs(self) -> dict[str, Any]:
        """The Configs of the parts."""
        names = list(self.modules)
        return {
            name: module.Config(**{
                field.name: getattr(self, setting_of_part(names, name, field.name))
                for field in dataclasses.fields(module.Config)
            })
            for name, module in self.modules.items()
        }  # fmt: skip

    @property
    def drafter_class(self) -> type[Composite]:
        """The class with the traits of this union."""
        return self._class()

    def _class(self) -> type[Composite]:
        built = [built_class(name, self.modules[name], config) for name, config in self.configs.items()]
        traits = traits_of_union(list(self.modules), [each.traits for each in built])
        union: type[Composite] = type(Composite.__name__, (Composite,), {"traits": traits})
        return union


@cache
def module_of_union(parts: tuple[tuple[str, ModuleType], ...]) -> ModuleType:
    """The module of a union, as if it were a file: `Config` and `build`.

    Args:
        parts: names and modules of different drafters.
    """
    names = [name for name, _ in parts]
    fields = {}
    for name, module in parts:
        hints = get_type_hints(module.Config)
        for field in dataclasses.fields(module.Config):
            key = setting_of_part(names, name, field.name)
            default = dataclasses.field(default=field.default, default_factory=field.default_factory)
            fields[key] = (key, hints[field.name], default)
    config = dataclasses.make_dataclass(
        "Config", fields.values(), bases=(Config,), namespace={"modules": dict(parts)}, frozen=True, kw_only=True
    )
    union = ModuleType("+".join(names))
    vars(union).update(Config=config, build=build)
    return union


def build(config: Config, target: Target, runtime: Runtime) -> Composite:
    """Builds all parts."""
    return Composite([
        config.modules[name].build(of_part, target, runtime) for name, of_part in config.configs.items()
    ])  # fmt: skip

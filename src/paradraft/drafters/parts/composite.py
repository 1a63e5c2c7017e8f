"""Several drafters whose drafts are merged into one tree, written `a+b`, such as `suffix+pard`.

The target reads the nodes of all parts in one pass. Under the match rule the text does not depend on the draft. The
rejection rule needs the distribution of a sibling given those before it, which may be another part's, so it refuses
unions with a part that draws. Parts that estimate choose their tokens without drawing: their unions are exact under any
rule.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.drafters import built_class, setting_of_part
from paradraft.drafters.parts.calibration import Calibration
from paradraft.drafters.parts.estimating import Estimating, Node
from paradraft.drafters.parts.union import union_of
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.traits import Traits
from paradraft.tree import ABSENT

GONE = -2
"""Node of a part that the union does not have."""


class Composite(Estimating):
    """Drafts the union of the drafts of its parts: the nodes of largest value.

    Parts that estimate draft trees if they can, the others chains of at most K tokens, whose values are learnt
    (`Calibration`). A part that does not estimate, such as a draft model, takes longer; it is left out of the rows in
    which its drafts are not worth their time. A part that drafts at most `max_k` is asked for no more.

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
        self._calibrations = {
            part: Calibration(is_slow=part.traits.drafts_one_by_one, reads=part.reads)
            for part in parts
            if not part.traits.estimates
        }
        self._in_turn = sorted(parts, key=self._calibrations.__contains__)
        self._drafts: dict[Drafter, Draft] = {}
        """The last drafts of parts that do not grow nodes, …"""
        self._nodes: dict[Drafter, list[list[Node]]] = {}
        """… the nodes of each row's last draft, by part, …"""
        self._union = list[list[Node]]()
        """… and of all parts together."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self._drafts = {}
        for part in self.parts:
            tree = drafting.tree if part.traits.estimates and part.traits.branching == "tree" else None
            wants_confidence = drafting.wants_confidence or part in self._calibrations
            part.start(dataclasses.replace(drafting, tree=tree, wants_confidence=wants_confidence), device)
        for calibration in self._calibrations.values():
            calibration.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.join(requests, prompt)
        for calibration in self._calibrations.values():
            calibration.join(requests)

    def grow(self, lengths: Sequence[int]) -> list[list[Node]]:
        """The union of the parts' drafts; those that estimate come first."""
        self._drafts, expected = {}, [0.0] * len(lengths)
        if not any(lengths) and not self._calibrations:
            return [[] for _ in lengths]
        for part in self._in_turn:
            part.worth = self.worth.of_part(self.parts.index(part))
            asked = lengths if part.max_k is None else [min(length, part.max_k) for length in lengths]
            if (calibration := self._calibrations.get(part)) is not None:
                # Also in plain rounds: with each call the part notes what it has cached.
                asked = calibration.lengths(asked, expected, part.worth.plain_s)
                begun_s = time.perf_counter()
                rows = calibration.nodes(self._proposed(part, asked), asked, part.worth.factor)
                calibration.add_time(time.perf_counter() - begun_s)
            elif isinstance(part, Estimating):
                rows = part.grow(asked)
            else:
                rows = nodes_of(self._proposed(part, asked))
            pairs = zip(expected, rows, strict=True)
            expected = [max(most, sum(node.value for node in nodes)) for most, nodes in pairs]
            self._nodes[part] = rows
        by_row = zip(*(self._nodes[part] for part in self.parts), strict=True)
        self._union = [union_of(trees, self.drafting.tree) for trees in by_row]
        return self._union

    def _proposed(self, part: Drafter, lengths: Sequence[int]) -> Draft:
        self._drafts[part] = part.propose(lengths)
        return self._drafts[part]

    def commit(self, new: Committed) -> None:
        """Adds the committed tokens to all parts, and for each what the target has drawn after its own nodes."""
        for part in self.parts:
            has_own = part.traits.needs_drawn and new.drawn is not None and part in self._drafts
            part.commit(dataclasses.replace(new, drawn=self._drawn_after(part, new.drawn or [])) if has_own else new)
        for calibration in self._calibrations.values():
            calibration.learn(new.tokens)
        self._drafts = {}

    def _drawn_after(self, part: Drafter, drawn: list[list[int]]) -> list[list[int]]:
        """For each row the target's tokens after the root and after the nodes of a part."""
        rows = []
        for union, own_tokens, own_parents, own in zip(self._union, *self._drafts[part].lists, drawn, strict=True):
            node_of = {(node.parent, node.token): number for number, node in enumerate(union)}
            nodes = [ABSENT]  # in the union, of the root and of the part's nodes; GONE for those that it does not have
            for token, parent in zip(own_tokens, own_parents, strict=True):
                nodes.append(node_of.get((nodes[parent + 1], token), GONE) if token != ABSENT else GONE)
            known = dict(enumerate(own, start=-1))  # by node; nodes that were cut off are not in it
            rows.append([known.get(node, ABSENT) for node in nodes])
        return rows

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.keep(rows)
        for calibration in self._calibrations.values():
            calibration.keep(rows.tolist())

    def save(self, row: int, most: int) -> tuple[list[Any], list[int]]:
        """The saved rows of all parts, and the number of tokens that each calibrated part has read."""
        read = [calibration.save(row) for calibration in self._calibrations.values()]
        return [part.save(row, most) for part in self.parts], read

    def restore(self, row: int, saved: tuple[list[Any], list[int]], shared: int) -> None:
        """See `Drafter`."""
        for part, of_part in zip(self.parts, saved[0], strict=True):
            part.restore(row, of_part, shared)
        for calibration, read in zip(self._calibrations.values(), saved[1], strict=True):
            calibration.restore(row, read, shared)

    def close(self) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.close()


def nodes_of(draft: Draft) -> list[list[Node]]:
    """The nodes of each row of a draft with values."""
    assert draft.values is not None
    sure = draft.values if draft.confidence is None else draft.confidence.tolist()
    rows = zip(*draft.lists, draft.values, sure, strict=True)
    return [[Node(*node) for node in zip(*row, strict=False) if node[0] != ABSENT] for row in rows]


def traits_of_union(names: Sequence[str], traits: Sequence[Traits]) -> Traits:
    """The traits of a union.

    Raises:
        ValueError: a part decides the size of its drafts itself. Its tree then cannot be a chain of K tokens, and may
            hold prompt tokens, which only it can read.
    """
    for name, each in zip(names, traits, strict=True):
        if each.branching == "own":
            raise ValueError(f"drafter {name!r} decides the size of its drafts itself, so it cannot be joined by +")
    draws = not all(each.estimates for each in traits)
    return Traits(
        label=" + ".join(each.label or name for name, each in zip(names, traits, strict=True)),
        words="their drafts in one tree",
        branching="tree",
        needs_drawn=any(each.needs_drawn for each in traits),
        estimates=True,
        depends_on_rounds=draws or any(each.depends_on_rounds for each in traits),
        needs_grammar=all(each.needs_grammar for each in traits),
        parts=sum(each.parts for each in traits),
        has_drawing_part=draws,
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

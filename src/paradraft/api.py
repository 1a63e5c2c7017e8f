"""From names to objects: `load` a target with a drafter."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from types import ModuleType
from typing import get_type_hints

from paradraft import drafters
from paradraft.core import Drafter, Tree
from paradraft.engine import Engine
from paradraft.models.loading import POCKET, load_target
from paradraft.models.runtime import Runtime
from paradraft.models.shapes import check_has_weights
from paradraft.models.target import Target

CPU = Runtime()


def load(
    target: str,
    *,
    drafter: str = "none",
    draft: str | None = None,
    k: int = 8,
    verify: str = "match",
    tree: Tree | int | None = None,
    lengths: str = "fixed",
    runtime: Runtime = CPU,
) -> Engine:
    """Loads a target and a drafter.

    Args:
        target: a Hugging Face id, a folder, or "pocket".
        drafter: one of `drafter_names()`; "none" decodes plainly.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round, one behind the other, at least 1.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same
            distribution and accepts more when sampling.
        tree: let drafts branch: a `Tree`, or a number of nodes to grow to. None drafts chains.
        lengths: how many of the k tokens to draft: "fixed" all, "heuristic" more after success,
            "confidence" while the drafter is sure, "expected" what pays on this machine.
        runtime: device, dtype, compilation.

    Raises:
        ValueError: a name or setting is unknown, or the draft does not fit the target.
    """
    check_draft(drafter, draft, target)
    for name in (target, draft or ""):
        check_has_weights(name)
    loaded = load_target(target, runtime)
    model = load_drafter(drafter, loaded, draft=draft, runtime=runtime)
    shape = Tree(budget=tree) if isinstance(tree, int) else tree
    return Engine(loaded, model, k=k, verify=verify, tree=shape, lengths=lengths)


def load_drafter(name: str, target: Target, *, draft: str | None, runtime: Runtime) -> Drafter:
    """Builds a drafter for a loaded target.

    Args:
        name: one of `drafter_names()`.
        target: whose text is to be guessed.
        draft: the draft model; None takes the shipped one.
        runtime: the target's.

    Raises:
        ValueError: the drafter is unknown or its draft model does not fit.
    """
    module = drafter_module(name)
    config = module.Config(draft=POCKET if draft is None else draft) if takes_draft(name) else module.Config()
    drafter: Drafter = module.build(config, target, runtime)
    return drafter


def check_draft(drafter: str, draft: str | None, target: str) -> None:
    """Raises ValueError if a draft model is missing, or given to a drafter that has none."""
    if draft is not None and not takes_draft(drafter):
        raise ValueError(f"drafter {drafter!r} takes no draft model, but draft={draft!r} was given")
    if draft is None and takes_draft(drafter) and target != POCKET:
        raise ValueError(f"drafter {drafter!r} needs a draft model: name its folder or Hugging Face id as draft")


def drafter_names() -> list[str]:
    """The files in `paradraft/drafters`."""
    return sorted(module.name for module in pkgutil.iter_modules(drafters.__path__))


def takes_draft(name: str) -> bool:
    """Whether a drafter has a draft model.

    Raises:
        ValueError: there is no such drafter.
    """
    return "draft" in {field.name for field in dataclasses.fields(drafter_module(name).Config)}


def branches(name: str) -> bool:
    """Whether a drafter's drafts can be trees.

    Raises:
        ValueError: there is no such drafter.
    """
    built = get_type_hints(drafter_module(name).build)["return"]
    return bool(built.can_branch)


def drafter_module(name: str) -> ModuleType:
    """The module of a drafter.

    Raises:
        ValueError: there is no such drafter.
    """
    if name not in drafter_names():
        raise ValueError(f"unknown drafter {name!r}: use one of {', '.join(drafter_names())}")
    return importlib.import_module(f"paradraft.drafters.{name}")

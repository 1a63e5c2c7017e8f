"""The drafters: one file each, found by its name."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from types import ModuleType
from typing import get_type_hints

from paradraft.core import Drafter
from paradraft.models.loading import POCKET
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


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
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


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
    return bool(built.branching != "chain")


def drafter_module(name: str) -> ModuleType:
    """The module of a drafter.

    Raises:
        ValueError: there is no such drafter.
    """
    if name not in drafter_names():
        raise ValueError(f"unknown drafter {name!r}: use one of {', '.join(drafter_names())}")
    return importlib.import_module(f"paradraft.drafters.{name}")

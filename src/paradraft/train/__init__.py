"""Training of drafters: one module per drafter, looked up by its name."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, get_type_hints

from paradraft.drafters import drafter_names
from paradraft.plugins import find_module, module_names
from paradraft.train import drafters

if TYPE_CHECKING:
    from paradraft.train.recipe import Recipe

GROUP = "paradraft.train"
"""Entry point group by which other packages add trainings."""


def trainee_names() -> list[str]:
    """Names of the drafters that have a module in `paradraft/train/drafters` or an entry point."""
    known = set(drafter_names())
    return [name for name in module_names(drafters.__path__, GROUP) if name in known]


def trainee_module(name: str) -> ModuleType:
    """Imports the module that trains a drafter; its function `build` is a `Builder`.

    Raises:
        ValueError: there is none.
    """
    if name not in trainee_names():
        raise ValueError(f"unknown training {name!r}: use one of {', '.join(trainee_names())}")
    return find_module(name, drafters.__name__, drafters.__path__, GROUP)


def recipe_class(module: ModuleType) -> type[Recipe]:
    """Class of a training module's recipes: the type of the first parameter of its `build`.

    Raises:
        ValueError: the module has no such function or annotation.
    """
    from paradraft.train.recipe import Recipe

    hints = get_type_hints(module.build) if hasattr(module, "build") else {}
    kind = next(iter(hints.values()), None)
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ValueError(f"{module.__name__}: it has no function build(recipe, data) whose recipe is a kind of Recipe")
    return kind

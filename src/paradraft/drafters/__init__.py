"""Registry of drafters: one file each, or a module of another package with an entry point.

A drafter is written `name` or `name:setting=value:…`, such as `ngram:max_ngram=5`; its settings are the fields of its
`Config`. Several are joined by `+`, as in `ngram:max_ngram=5+pard`; see `parts/composite.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from paradraft.models.names import POCKET
from paradraft.plugins import find_module, module_names, parse_settings
from paradraft.traits import Serving, Traits

if TYPE_CHECKING:
    from paradraft.core import Drafter
    from paradraft.models.runtime import Runtime
    from paradraft.models.target import Target, TargetFacts

PLUS = "+"
"""Joins the drafters of a union."""
GROUP = "paradraft.drafters"
"""Entry point group for drafters of other packages."""
DRAFT = "draft"
"""The field of a `Config` that names the draft model; it is set apart from the other settings."""


def load_drafter(drafter: str, target: Target | TargetFacts, *, draft: str | None, runtime: Runtime) -> Drafter:
    """Builds a drafter for a loaded target.

    Args:
        drafter: one of `drafter_names()`, optionally with settings, or several joined by `+`.
        target: a drafter that cannot run ahead needs a `Target`.
        draft: the draft model; None for the shipped one.

    Raises:
        ValueError: drafter or setting is unknown, or its draft model does not fit.
    """
    built: Drafter = drafter_module(drafter).build(drafter_config(drafter, draft), target, runtime)
    return built


def check_draft(drafter: str, draft: str | None, target: str) -> None:
    """Raises ValueError if a draft model is missing or not needed, if a union needs two, or if a setting is wrong."""
    name, _ = split_settings(drafter)
    takers = [part for part in part_names(drafter) if takes_draft(part)]
    if len(takers) > 1 and not target == POCKET == (draft or POCKET):
        needing = " and ".join(takers)
        raise ValueError(f"drafter {name!r}: {needing} need different draft models, and draft= is one: join only one")
    if draft is not None and not takers:
        raise ValueError(f"drafter {name!r} takes no draft model, leave out draft={draft!r} or name its drafter")
    if draft is None and takers and target != POCKET:
        raise ValueError(f"drafter {name!r} needs a draft model: name its folder or Hugging Face id as draft")
    drafter_config(drafter, draft)


def drafter_names() -> list[str]:
    """The names of all drafters, those of other packages included."""
    return module_names(__path__, GROUP)


def is_drafter(name: str) -> bool:
    """Whether it names a drafter, or several joined by `+`."""
    return set(part_names(name)) <= set(drafter_names())


def part_names(drafter: str) -> list[str]:
    """The names of the drafters of a union; of any other drafter, its own name."""
    return split_settings(drafter)[0].split(PLUS)


def takes_draft(drafter: str) -> bool:
    """Whether a drafter has a draft model."""
    return DRAFT in _fields(drafter_module(drafter))


def branches(drafter: str) -> bool:
    """Whether a drafter supports trees of a requested shape."""
    return drafter_class(drafter).traits.branching in ("spine", "tree")


@cache
def _all_traits() -> dict[str, Traits]:
    traits = {}
    for name in drafter_names():
        with suppress(ValueError, TypeError, AttributeError):  # another package's faulty module, which may not be used
            traits[name] = built_class(name, find_module(name, __name__, __path__, GROUP)).traits
    return traits


def traits_of(name: str) -> Traits:
    """The traits of a drafter without settings; the defaults for an unknown name, such as one in an old result."""
    if PLUS not in name:
        return _all_traits().get(name, Traits())
    with suppress(ValueError, TypeError, AttributeError):
        return drafter_class(name).traits
    return Traits()


def serving_of(drafter: str) -> Serving:
    """How other engines use a drafter's checkpoints; the defaults for an unknown name."""
    return drafter_class(drafter).serving if split_settings(drafter)[0] in drafter_names() else Serving()


def drafter_class(drafter: str) -> type[Drafter]:
    """The class of a drafter with its settings."""
    return built_class(drafter, drafter_module(drafter), drafter_config(drafter))


def built_class(drafter: str, module: ModuleType, config: Any = None) -> type[Drafter]:
    """The return type of a module's `build`, unless the Config overrides it, because the class depends on settings."""
    built: type[Drafter] | None = get_type_hints(module.build).get("return")
    if built is None:
        raise ValueError(
            f"drafter {drafter!r}: {module.__name__}.build does not say what it returns: add `-> ` and the class"
        )
    chosen: type[Drafter] = getattr(config, "drafter_class", built)
    return chosen


def drafter_module(drafter: str) -> ModuleType:
    """The module of a drafter, or that of a union of drafters; raises ValueError if there is none of this name."""
    names = part_names(drafter)
    for name in names:
        if name not in drafter_names():
            known = ", ".join(drafter_names())
            if name == "auto":
                raise ValueError(f"drafter 'auto' has no settings, joins no other, and has no name here: use {known}")
            raise ValueError(f"unknown drafter {name!r}: use one of {known}")
    modules = [find_module(name, __name__, __path__, GROUP) for name in names]
    if len(modules) == 1:
        return modules[0]
    if len(set(names)) < len(names):
        raise ValueError(f"drafter {PLUS.join(names)!r}: name each drafter once")
    from paradraft.drafters.parts.composite import module_of_union  # imports torch

    return module_of_union(tuple(zip(names, modules, strict=True)))


def setting_of_part(names: Sequence[str], part: str, setting: str) -> str:
    """The setting's name in a union: that of any but the last part begins with the part's name; `draft` is shared.

    >>> [setting_of_part(["ngram", "pard"], *each) for each in [("ngram", "max_ngram"), ("pard", "draft")]]
    ['ngram_max_ngram', 'draft']
    """
    is_shared = setting.partition("=")[0] == DRAFT
    return setting if part == names[-1] or is_shared else f"{part}_{setting}"


def split_settings(spec: str) -> tuple[str, list[str]]:
    """Splits a name from its settings; a colon without a following `setting=` belongs to the value before it.

    The settings of a union are named as in `setting_of_part`.

    >>> split_settings("pard:k=4:draft=shape:llama-3.2-1b")
    ('pard', ['k=4', 'draft=shape:llama-3.2-1b'])
    >>> split_settings("n-gram")
    ('ngram', [])
    >>> split_settings("ngram:max_ngram=5+pard:k=4")
    ('ngram+pard', ['ngram_max_ngram=5', 'k=4'])
    """
    parts: list[str] = []
    for part in spec.split(PLUS):
        # A plus without a name after it is of a label, and one in a value belongs to that, unless a drafter follows.
        name = part.partition(":")[0]
        if parts and (not name or (":" in parts[-1] and _known(name) not in drafter_names())):
            parts[-1] += PLUS + part
        else:
            parts.append(part)
    names = [_known(part.partition(":")[0]) for part in parts]
    settings = [
        setting_of_part(names, name, setting)
        for name, part in zip(names, parts, strict=True)
        for setting in re.split(r":(?=\w+=)", part.partition(":")[2])
        if ":" in part
    ]
    return PLUS.join(names), settings


def _known(name: str) -> str:
    """The name of the drafter with this label, or the name itself."""
    name = name.strip()
    if re.fullmatch("[a-z0-9_]*", name):  # a module's name is known without loading all drafters
        return name
    return next((known for known, traits in _all_traits().items() if traits.label == name), name)


def setting_names(drafter: str) -> list[str]:
    """The settings of a drafter: the fields of its `Config` without the draft model."""
    return [field for field in _fields(drafter_module(drafter)) if field != DRAFT]


def _fields(module: ModuleType) -> list[str]:
    return [field.name for field in dataclasses.fields(module.Config)]


def drafter_config(drafter: str, draft: str | None = None) -> Any:
    """The `Config` of a drafter; `draft` None is the shipped draft model.

    Raises:
        ValueError: drafter or setting is unknown, a setting is repeated, or its value does not fit.

    >>> drafter_config("ngram:max_ngram=5")
    Config(max_ngram=5)
    """
    name, settings = split_settings(drafter)
    config = drafter_module(name).Config
    has_draft = DRAFT in _fields(drafter_module(name))
    elsewhere = {DRAFT: f"; name the draft model by --draft, or {DRAFT}="} if has_draft else {}
    values = parse_settings(settings, config, f"drafter {name!r}", elsewhere=elsewhere)
    if has_draft:
        values[DRAFT] = POCKET if draft is None else draft
    return config(**values)


def drafter_settings(drafter: str) -> dict[str, Any]:
    """All settings of a drafter with their values, defaults included, without the draft model."""
    return {name: value for name, value in vars(drafter_config(drafter)).items() if name != DRAFT}

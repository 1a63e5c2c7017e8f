"""Registry of drafters: one file each, or a module of another package with an entry point.

A drafter is written `name` or `name:setting=value:…`, such as `ngram:max_ngram=5`; its settings are the fields of its
`Config`.
"""

from __future__ import annotations

import dataclasses
import re
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

GROUP = "paradraft.drafters"
"""Entry point group for drafters of other packages."""
DRAFT = "draft"
"""The field of a `Config` that names the draft model; it is set apart from the other settings."""


def load_drafter(drafter: str, target: Target | TargetFacts, *, draft: str | None, runtime: Runtime) -> Drafter:
    """Builds a drafter for a loaded target.

    Args:
        drafter: one of `drafter_names()`, optionally with settings.
        target: a drafter that cannot run ahead needs a `Target`.
        draft: the draft model; None for the shipped one.

    Raises:
        ValueError: drafter or setting is unknown, or its draft model does not fit.
    """
    built: Drafter = drafter_module(drafter).build(drafter_config(drafter, draft), target, runtime)
    return built


def check_draft(drafter: str, draft: str | None, target: str) -> None:
    """Raises ValueError if a draft model is missing or not needed, or if a setting is wrong."""
    (name, _), takes_model = split_settings(drafter), takes_draft(drafter)
    if draft is not None and not takes_model:
        raise ValueError(f"drafter {name!r} takes no draft model, but draft={draft!r} was given")
    if draft is None and takes_model and target != POCKET:
        raise ValueError(f"drafter {name!r} needs a draft model: name its folder or Hugging Face id as draft")
    drafter_config(drafter, draft)


def drafter_names() -> list[str]:
    """The names of all drafters, those of other packages included."""
    return module_names(__path__, GROUP)


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
            traits[name] = _built(name, find_module(name, __name__, __path__, GROUP)).traits
    return traits


def traits_of(name: str) -> Traits:
    """The traits of a drafter without settings; the defaults for an unknown name, such as one in an old result."""
    return _all_traits().get(name, Traits())


def serving_of(drafter: str) -> Serving:
    """How other engines use a drafter's checkpoints; the defaults for an unknown name."""
    return drafter_class(drafter).serving if split_settings(drafter)[0] in drafter_names() else Serving()


def drafter_class(drafter: str) -> type[Drafter]:
    """The return type of a drafter's `build`."""
    built = _built(drafter, drafter_module(drafter))
    # A Config may override it, if the class depends on settings.
    chosen: type[Drafter] = getattr(drafter_config(drafter), "drafter_class", built)
    return chosen


def _built(drafter: str, module: ModuleType) -> type[Drafter]:
    built: type[Drafter] | None = get_type_hints(module.build).get("return")
    if built is None:
        raise ValueError(
            f"drafter {drafter!r}: {module.__name__}.build does not say what it returns: add `-> ` and the class"
        )
    return built


def drafter_module(drafter: str) -> ModuleType:
    """The module of a drafter; raises ValueError if there is none of this name."""
    name, _ = split_settings(drafter)
    if name not in drafter_names():
        raise ValueError(f"unknown drafter {name!r}: use one of {', '.join(drafter_names())}")
    return find_module(name, __name__, __path__, GROUP)


def split_settings(spec: str) -> tuple[str, list[str]]:
    """Splits a name from its settings; a colon without a following `setting=` belongs to the value before it.

    >>> split_settings("pard:k=4:draft=shape:llama-3.2-1b")
    ('pard', ['k=4', 'draft=shape:llama-3.2-1b'])
    >>> split_settings("n-gram")
    ('ngram', [])
    """
    name, colon, settings = spec.partition(":")
    if not re.fullmatch("[a-z0-9_]*", name):  # no module's name; the others are known without loading all drafters
        name = next((known for known, traits in _all_traits().items() if traits.label == name), name)
    return name, re.split(r":(?=\w+=)", settings) if colon else []


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

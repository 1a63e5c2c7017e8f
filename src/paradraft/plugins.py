"""Plugin modules by name: the files of a package, and entry points of other installed packages.

An entry point has a group, a name, and the module's import path.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
import types
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def module_names(folders: Iterable[str], group: str) -> list[str]:
    """All plugin names, sorted: modules in the package's `folders`, and entry points of `group`."""
    return sorted(_shipped(folders) | _entry_points(group, tuple(sys.path)).names)


def find_module(name: str, package: str, folders: Iterable[str], group: str) -> ModuleType:
    """Imports a module that `module_names` lists.

    Raises:
        ValueError: several packages offer the name, or another package's module cannot be imported.
    """
    points = list(_entry_points(group, tuple(sys.path)).select(name=name))
    owners = [*(["paradraft"] if name in _shipped(folders) else []), *map(_owner, points)]
    if len(owners) > 1:
        raise ValueError(
            f"{group}: {' and '.join(owners)} both have {name!r}: uninstall one, or rename its entry point"
        )
    if not points:
        return importlib.import_module(f"{package}.{name}")
    try:
        return importlib.import_module(points[0].value)
    except ImportError as error:
        raise ValueError(f"{group}: {name!r} of {owners[0]} cannot be imported: {error}") from error


@cache
def _entry_points(group: str, _path: tuple[str, ...]) -> EntryPoints:
    """Those of the packages in `sys.path`; reading them takes 50 ms."""
    return metadata.entry_points(group=group)


def _shipped(folders: Iterable[str]) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(list(folders)) if not module.ispkg}


def _owner(point: EntryPoint) -> str:
    return f"package {point.dist.name!r}" if point.dist is not None else point.value


def parse_settings(
    settings: Iterable[str], config: type, subject: str, *, elsewhere: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Values of `setting=value` texts.

    Args:
        config: the dataclass whose fields are the settings.
        subject: the beginning of error messages, such as "drafter 'ngram'".
        elsewhere: fields that are set elsewhere, each with how.

    Raises:
        ValueError: a setting is unknown or occurs twice, or its value has the wrong type.
    """
    elsewhere, hints = elsewhere or {}, get_type_hints(config)
    known = [field.name for field in dataclasses.fields(config) if field.name not in elsewhere]
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in known or key in values:
            hint = f"its settings are {', '.join(known)}, each at most once" if known else "it has no settings"
            raise ValueError(f"{subject}: {setting!r} is no setting=value of it; {hint}{elsewhere.get(key, '')}")
        values[key] = _value(text, hints[key], f"{subject}: {key}={text!r}")
    return values


WORDS = {"true": True, "false": False, "none": None}
ALLOWED = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none", str: "a text"}


def _value(text: str, hint: Any, prefix: str) -> Any:
    """Parses a value by its type: int, float, bool, str, literal, None, or a union; errors begin with `prefix`."""
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in sorted(hints, key=lambda kind: kind is str):  # any text is a str
        if get_origin(kind) is Literal and text in map(str, get_args(kind)):
            return next(value for value in get_args(kind) if str(value) == text)
        if kind in (bool, types.NoneType) and isinstance(value := WORDS.get(text.lower(), text), kind):
            return value
        if kind in (int, float, str):
            try:
                return kind(text)
            except ValueError:
                continue
    literals = [str(value) for kind in hints if get_origin(kind) is Literal for value in get_args(kind)]
    allowed = " or ".join([*literals, *(ALLOWED[kind] for kind in hints if kind in ALLOWED)])
    raise ValueError(f"{prefix}: use {allowed}")

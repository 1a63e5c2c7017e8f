"""Reads a recipe from a YAML file, applies overrides of the command line, and lists the settings of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paradraft.data.mix import MIXED, PLAIN
from paradraft.train.recipe import Recipe

R = TypeVar("R", bound=Recipe)


def load_recipe(kind: type[R], file: Path, overrides: list[str]) -> R:
    """Reads a recipe and applies `key=value` overrides.

    Raises:
        ValueError: the file does not exist or is no mapping, a key is unknown, or a value is invalid.
    """
    if not file.is_file():
        raise ValueError(f"recipe {str(file)!r} does not exist")
    try:
        settings = _parsed(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {file} is not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"recipe {file} is not YAML: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"recipe {file} must hold `key: value` lines")
    return recipe_of(kind, settings, overrides)


def recipe_of(kind: type[R], settings: dict[str, Any], overrides: Sequence[str]) -> R:
    """Makes a recipe of settings and `key=value` overrides; raises ValueError as `load_recipe`."""
    settings = dict(settings)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: write overrides as key=value")
        try:
            _set(settings, key, _value(value))
        except ValueError:
            raise ValueError(f"{override!r}: {value!r} is not a YAML value") from None
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise ValueError("; ".join(_complaint(kind, e["loc"], e["msg"], e["input"]) for e in error.errors())) from None


def _set(settings: dict[str, Any], key: str, value: object) -> None:
    """Sets a key; dots separate groups of settings, as in `lora.rank=8`."""
    *groups, last = key.split(".")
    for group in groups:
        inner = settings.get(group)
        settings[group] = settings = dict(inner) if isinstance(inner, dict) else {}
    settings[last] = value


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    # An impossible date is a ValueError, and a thousand nested brackets are a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _value(text: str) -> Any:
    # YAML 1.1 reads 1e-3, a usual learning rate, as a string.
    try:
        return float(text) if "e" in text.lower() else _parsed(text)
    except ValueError:
        return _parsed(text)


def _complaint(kind: type[BaseModel], location: tuple[int | str, ...], message: str, value: object) -> str:
    if location[:1] == ("data",):  # pydantic includes the tag of the entry's type
        location = tuple(part for part in location if part not in (PLAIN, MIXED))
    key = ".".join(map(str, location))
    if not key:
        return message.removeprefix("Value error, ")
    if "Extra inputs" in message:
        known = groups_of(kind).get(str(location[0]), kind) if len(location) > 1 else kind
        return f"unknown recipe key {key!r}; known are {', '.join(known.model_fields)}"
    if message == "Field required":
        return f"recipe key {key!r} is missing"
    return f"recipe key {key!r}: {message[0].lower()}{message[1:]}, not {value!r}"


def groups_of(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Settings of a recipe that are groups of settings, such as `lora`."""
    groups: dict[str, type[BaseModel]] = {}
    for name, field in kind.model_fields.items():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                groups[name] = part
    return groups


def _parts(annotation: Any) -> list[Any]:
    """A type and all its type arguments, recursively."""
    return [annotation, *(inner for part in get_args(annotation) for inner in _parts(part))]


def settings_of(kind: type[Recipe]) -> dict[str, FieldInfo]:
    """All settings of a recipe; those of groups come last, as `group.setting`."""
    nested = {
        f"{group}.{name}": field
        for group, model in groups_of(kind).items()
        for name, field in model.model_fields.items()
    }
    return dict(kind.model_fields) | nested

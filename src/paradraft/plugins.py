"""Plugin modules by name: the files of a package, and entry points of other installed packages.

An entry point has a group, a name, and the module's import path.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType


def module_names(folders: Iterable[str], group: str) -> list[str]:
    """All plugin names, sorted: modules in the package's `folders`, and entry points of `group`."""
    return sorted(_shipped(folders) | {point.name for point in entry_points(group=group)})


def find_module(name: str, package: str, folders: Iterable[str], group: str) -> ModuleType:
    """Imports a module that `module_names` lists.

    Raises:
        ValueError: several packages offer the name, or another package's module cannot be imported.
    """
    points = list(entry_points(group=group, name=name))
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


def _shipped(folders: Iterable[str]) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(list(folders)) if not module.ispkg}


def _owner(point: EntryPoint) -> str:
    return f"package {point.dist.name!r}" if point.dist is not None else point.value

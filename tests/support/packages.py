"""Packages that others might install: modules, and entry points that name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path,
    name: str,
    patch: pytest.MonkeyPatch,
    *,
    modules: Mapping[str, str],
    drafters: Mapping[str, str] | None = None,
    train: Mapping[str, str] | None = None,
) -> None:
    """Puts a package where Python finds it.

    Args:
        folder: where to write it.
        name: of the package.
        patch: undoes it.
        modules: sources by name.
        drafters: modules of drafters by their names.
        train: modules of trainings by their names.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in (("paradraft.drafters", drafters), ("paradraft.train", train)):
        lines += [f"[{group}]", *(f"{key} = {module}" for key, module in (points or {}).items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    patch.syspath_prepend(folder)

"""The tables that `paradraft record` keeps in the user's cache, by a digest of the model."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from paradraft.digests import target_digest
from paradraft.models.forward.cpu.build import cache_folder, is_private
from paradraft.models.names import is_shape
from paradraft.sources.loading import locate

DIGITS = 16
"""Length of the digest that names a table."""


def path_of(target: str) -> Path | None:
    """The file or folder of a model; None for a shape, and for a model that is not on this machine."""
    if is_shape(located := locate(target, "target")):
        return None
    if (path := Path(located)).exists():
        return path
    config = try_to_load_from_cache(located, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def bytes_on_disk(target: str) -> int:
    """Size of a model's weights; 0 for a model without a path, see `path_of`."""
    if (path := path_of(target)) is None:
        return 0
    files = [path] if path.is_file() else [*path.glob("*.safetensors")] or [*path.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


def table_name(target: str) -> str | None:
    """The name of a model's table; None for a model without a path, see `path_of`."""
    return None if (path := path_of(target)) is None else target_digest(path)[:DIGITS]


def table_file(name: str) -> Path:
    """The file of a table: that in the cache by the name that `paradraft record` printed, else the file of this name.

    Raises:
        ValueError: there is no cache.
    """
    if re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", name) is None:
        return Path(name)
    if (folder := cache_folder()) is None:
        raise ValueError(f"table={name}: there is no cache folder (set HOME or XDG_CACHE_HOME), so name a file")
    return folder / f"recorded-{name}.safetensors"


def recorded_for(target: str) -> str | None:
    """The name of the table in the cache for a model; None without one, or where others can write into it."""
    folder = cache_folder()
    if folder is None or not any(folder.glob("recorded-*")) or (name := table_name(target)) is None:
        return None
    return name if is_private(table_file(name)) else None

"""What the user's cache has for a model, by a digest of it: the table of `paradraft record`, and the place of the last
drafter that was trained for it."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from paradraft.digests import target_digest
from paradraft.files import write_output
from paradraft.models.forward.cpu.build import cache_folder, is_made, is_private
from paradraft.models.names import is_shape
from paradraft.sources.loading import locate

DIGITS = 16
"""Length of the digest that names a table."""
DRAFTER_FILE = "config.json"
"""In the folder of every trained drafter."""


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


def remember_drafter(target: str, drafter: Path) -> bool:
    """Keeps a trained drafter's folder as that of a model, and forgets folders that no longer exist.

    Returns:
        Whether it is kept: not for a model without a path, see `path_of`, and not without a private cache.

    Raises:
        ValueError: there is no such model.
        OSError: the cache cannot be written.
    """
    folder, name = cache_folder(), table_name(target)
    if folder is None or name is None or not is_made(folder, "places of trained drafters are"):
        return False
    for file in folder.glob("drafter-*"):
        if not _drafter_in(file):
            file.unlink(missing_ok=True)
    write_output(folder / f"drafter-{name}", str(drafter.resolve()).encode())
    return True


def drafter_for(target: str) -> str | None:
    """The folder of the last drafter that was trained for a model; None without one, as in `recorded_for`."""
    folder = cache_folder()
    if folder is None or not any(folder.glob("drafter-*")) or (name := table_name(target)) is None:
        return None
    return _drafter_in(folder / f"drafter-{name}")


def _drafter_in(file: Path) -> str | None:
    if not is_private(file):
        return None
    folder = Path(file.read_text(encoding="utf-8"))
    return str(folder) if (folder / DRAFTER_FILE).is_file() else None

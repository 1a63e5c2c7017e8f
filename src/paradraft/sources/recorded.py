"""What the user's cache has for a model, by a digest of it: the table of `paradraft record`, and the last drafter
that was trained for it."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from paradraft.digests import model_digest, target_digest
from paradraft.files import write_output
from paradraft.models.forward.cpu.build import cache_folder, is_made, is_private
from paradraft.models.names import is_shape
from paradraft.sources.loading import locate

DIGITS = 16
"""Length of the digest that names the files of a model."""


def path_of(target: str) -> Path | None:
    """The file or folder of a model; None for a shape, and for a model that is not on this machine, or nowhere."""
    try:
        located = locate(target, "target")
    except ValueError:
        return None  # loading says why, after the settings are checked
    if is_shape(located):
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


@dataclass(frozen=True, kw_only=True)
class TrainedDrafter:
    """The last drafter that was trained for a model.

    Args:
        name: that it drafts as.
        k: most tokens of its drafts, if it has a limit.
        folder: absolute path.
        digest: of the folder's files, see `model_digest`.
    """

    name: str
    k: int | None
    folder: str
    digest: str


def remember_drafter(target: str, folder: Path, name: str, k: int | None) -> bool:
    """Keeps a drafter as the last one that was trained for a model.

    Returns:
        Whether it is kept: not for a model without a path, see `path_of`, and not without a private cache.
    """
    cache, of = cache_folder(), table_name(target)
    if cache is None or of is None or not is_made(cache, "places of trained drafters are"):
        return False
    trained = TrainedDrafter(name=name, k=k, folder=str(folder.resolve()), digest=model_digest(folder))
    file = cache / f"drafter-{of}"
    try:
        write_output(file, json.dumps(asdict(trained)).encode())
        file.chmod(0o600)
    except OSError:
        return False
    return True


def drafter_for(target: str) -> TrainedDrafter | None:
    """The last drafter that was trained for a model; None without one, or where others can write into its file.

    If its folder is gone or has other files, a warning says so, and it is left out.
    """
    cache = cache_folder()
    if cache is None or not any(cache.glob("drafter-*")) or (of := table_name(target)) is None:
        return None
    if not is_private(file := cache / f"drafter-{of}"):
        return None
    try:
        trained = TrainedDrafter(**json.loads(file.read_bytes()))
        is_there = model_digest(Path(trained.folder)) == trained.digest
    except (OSError, ValueError, TypeError):
        return None
    if is_there:
        return trained
    warnings.warn(
        f"the drafter trained for this model is left out, because {trained.folder!r} was moved or changed: name its "
        f"folder (--draft), train again, or delete {str(file)!r}",
        stacklevel=2,
    )
    return None

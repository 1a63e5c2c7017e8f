"""Drafters that are shipped as adapters, and the models that they draft for, in any format."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from paradraft.formats.folder import ADAPTER_CONFIG
from paradraft.formats.gguf import is_gguf, read_gguf
from paradraft.sources.gguf_config import numbers_of
from paradraft.sources.recorded import path_of
from paradraft.sources.rounding_reader import read_tensor, stored_tensors

FILE = "shipped.json"
"""File of a shipped adapter: `Shipped`, without the folder."""
NORMS = ("model.norm.weight", "output_norm.weight")
"""Names of the final norm in folders and in GGUF files."""


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A drafter that is shipped as an adapter.

    Args:
        folder: of the adapter.
        target: `norm_digest` of the model that it drafts for.
    """

    folder: Path
    target: str


def shipped_folder() -> Path:
    """The folder of all shipped adapters."""
    return Path(str(resources.files("paradraft"))) / "shipped"


def all_shipped() -> list[Shipped]:
    """All shipped drafters, by name."""
    files = sorted(shipped_folder().glob(f"*/{FILE}"))
    return [Shipped(folder=file.parent, **json.loads(file.read_bytes())) for file in files]


def norm_digest(target: str) -> str | None:
    """SHA-256 of a model's final norm in bfloat16, which all formats of a model store as it was trained.

    Fine-tunes that leave the norms alone (LoRA) have the digest of their base.

    Returns:
        None for a model without files on this machine, and where that norm cannot be read.
    """
    if (path := path_of(target)) is None or (norm_D := _final_norm(path)) is None:
        return None
    return hashlib.sha256(norm_D.bfloat16().view(torch.int16).numpy().tobytes()).hexdigest()


def _final_norm(path: Path) -> Tensor | None:
    in_folder, in_file = NORMS
    try:
        if is_gguf(str(path)):
            return numbers_of(read_gguf(str(path)), in_file)
        stored = stored_tensors(str(path)) or {}
        return read_tensor(stored[in_folder][0], in_folder)
    except (KeyError, ValueError):
        return None


def adapter_folder(name: str) -> Path:
    """The folder of this name, or else that of the shipped adapter; raises ValueError if there is neither."""
    shipped = {one.folder.name: one.folder for one in all_shipped()}
    if name in shipped and not (Path(name) / ADAPTER_CONFIG).is_file():
        return shipped[name]
    if not Path(name).exists():
        raise ValueError(f"{name!r} is no adapter: there is no such folder, and shipped are {', '.join(shipped)}")
    return Path(name)


def command_for(target: str) -> str | None:
    """The command that makes the drafter that is shipped for a model; None without one."""
    digest = norm_digest(target)
    names = [shipped.folder.name for shipped in all_shipped() if shipped.target == digest]
    return f"paradraft merge {names[0]} --out FOLDER --target {shlex.quote(target)}" if names else None

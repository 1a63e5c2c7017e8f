"""Writes model folders so that an interrupted write leaves no broken one: `config.json` comes last."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.files import one_line_when_full, sync, sync_entries

CARD = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
"""File of a folder that PEFT writes, which has adapters and no model."""


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder to write a model into, and moves its files to `folder` when all are on the disk.

    The model must include a `config.json`.

    Raises:
        OSError: the disk is full.
    """
    original, folder = folder, folder.resolve()
    with one_line_when_full(original, "run the same command again"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".new", dir=folder.parent))
        try:
            yield temporary
            # Safetensors are written for their owner alone, and a server is often another user.
            for file in temporary.rglob("*.safetensors"):
                file.chmod((temporary / "config.json").stat().st_mode)
            sync(temporary)
            put_in_place(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raises ValueError if `out` is no new or empty folder, or cannot be written."""
    if out.is_dir():
        if any(out.iterdir()):
            raise ValueError(f"{str(out)!r} is not empty: delete it, or choose another folder")
    elif out.exists():
        raise ValueError(f"{str(out)!r} is a file: choose another folder")
    above = next(folder for folder in out.resolve().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{str(out)!r} cannot be written: {str(above)!r} is no folder, or not yours")


def check_index(folder: Path) -> None:
    """Raises ValueError if a model's index names weights outside its folder."""
    index = folder / "model.safetensors.index.json"
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # no index, or a damaged one, which `transformers` reports
    if outside := sorted(str(file) for file in files if Path(str(file)).name != file):
        raise ValueError(f"{index} names {outside[0]!r}, which is not a file of its folder: correct it")


def save_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beside: Mapping[str, dict[str, Tensor]] | None = None,
    files: Mapping[str, str | bytes] | None = None,
) -> None:
    """Writes an ordinary Hugging Face folder; `folder` appears or changes only when all is written.

    Args:
        beside: further safetensors files by relative path.
        files: the contents of further files by relative path.
    """
    with whole_folder(folder) as new:
        write_model(new, model, tokenizer)
        for name, tensors in (beside or {}).items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, new / name)
        for name, contents in (files or {}).items():
            (new / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())


def write_model(new: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the files of an ordinary Hugging Face folder into one that `whole_folder` yields."""
    if not model.generation_config.do_sample:
        # Published models have sampling settings without `do_sample`, which `transformers` reads but refuses to write.
        try:
            model.generation_config.validate(strict=True)
        except ValueError:
            model.generation_config.do_sample = True
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)


def put_in_place(new: Path, folder: Path) -> None:
    """Moves the files of a complete model folder into another, `config.json` last: it marks the folder as complete.

    After an interruption, calling it again moves the rest. The card is moved just before `config.json`: while `new`
    has a card, no other one is needed.
    """
    files = [file.relative_to(new) for file in new.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda f: (f == Path("config.json"), f == Path(CARD))):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        sync_entries((folder / file).parent)
        os.replace(new / file, folder / file)
    sync_entries(folder)
    shutil.rmtree(new)

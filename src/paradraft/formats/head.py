"""The checkpoint of a drafter that reads its target's hidden states: weights and a config that names one target.

A folder with `config.json`, whose `model_type` is the drafter's name, and `model.safetensors`. Such a drafter is worth
nothing beside another model, and loads beside none: its config holds the shape of its target and a digest of the
weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from paradraft.digests import weights_digest

S = TypeVar("S", int, float, bool, str)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
BODY = "model."
"""What the names of weights begin with in a folder that was exported for vLLM, and nowhere else."""
TARGET = "target"
"""The key of the config that holds a `TargetIdentity`."""


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """By what a target is known again.

    Args:
        hidden_size: its D.
        num_hidden_layers: how many layers it has.
        vocab_size: rows of its output head.
        weights: see `paradraft.digests.weights_digest`; None for random weights, of which there are no files.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    weights: str | None

    @classmethod
    def of(cls, config: PretrainedConfig, *, reads_weights: bool = True) -> TargetIdentity:
        """That of a model, by its config, and by the files that were loaded with it."""
        return cls(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            weights=weights_digest(config.name_or_path) if config.name_or_path and reads_weights else None,
        )

    def check(self, target: TargetIdentity, draft: str) -> None:
        """Raises ValueError if this is not the identity of a target.

        Args:
            target: the one that is loaded.
            draft: the name of the drafter, for the message.
        """
        for key, trained in vars(self).items():
            found = getattr(target, key)
            if None not in (trained, found) and trained != found:
                told = "other weights" if key == "weights" else f"{key}={trained}, and this one has {found}"
                raise ValueError(f"draft {draft!r} was trained for another target, with {told}: train one for this")


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a checkpoint holds.

    Args:
        config: the drafter's own settings, `model_type` among them.
        target: for which it was trained.
        weights: by name.
        name: of the folder, for messages.
    """

    config: dict[str, Any]
    target: TargetIdentity
    weights: dict[str, Tensor]
    name: str = ""

    def setting(self, key: str, kind: type[S], *allowed: S) -> S:
        """A setting of the config; a number is at least 1 if it is whole.

        Args:
            key: its name.
            kind: its type.
            allowed: its values; any by default.

        Raises:
            ValueError: it is missing, or another.
        """
        found = self.config.get(key)
        if type(found) is not kind or (allowed and found not in allowed) or (type(found) is int and found < 1):
            raise ValueError(f"draft {self.name!r}: {key} in its config.json is {found!r}: train it again")
        return found

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of the weights.

        Args:
            name: of the tensor.
            shape: that it must have.

        Raises:
            ValueError: it is missing, or has another shape.
        """
        found = self.weights.get(name)
        if found is None or found.shape != shape:
            told = "is missing" if found is None else f"has the shape {tuple(found.shape)}, not {shape}"
            raise ValueError(f"draft {self.name!r}: {name} {told}: train it again")
        return found


def write_head(folder: Path, head: Head) -> None:
    """Writes both files into a folder that exists. The same content gives the same bytes."""
    save_file({name: weight.cpu().contiguous() for name, weight in head.weights.items()}, folder / WEIGHTS)
    text = json.dumps(head.config | {TARGET: asdict(head.target)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_head(name: str, kind: str, config: PretrainedConfig) -> Head:
    """Reads a checkpoint for a target.

    Args:
        name: a folder with a `config.json`, or a Hugging Face id.
        kind: the drafter that is to use it.
        config: the target's.

    Raises:
        ValueError: it is a checkpoint of something else or for another target, or damaged.
    """
    head = read_checkpoint(name, kind)
    head.target.check(TargetIdentity.of(config), name)
    return head


def read_checkpoint(name: str, kind: str | None = None) -> Head:
    """Reads a checkpoint, of a kind or of any, for whatever target it is.

    Raises:
        ValueError: it is a checkpoint of something else, or damaged.
    """
    with _reading(name, kind):
        config, target = _read_config(name, kind)
        weights = {key.removeprefix(BODY): weight for key, weight in load_file(file_of(name, WEIGHTS)).items()}
        return Head(config=config, target=target, weights=weights, name=name)


def read_identity(name: str, kind: str) -> TargetIdentity | None:
    """The target of a checkpoint, by its config alone; None if it is a checkpoint of another format.

    Raises:
        ValueError: as `read_checkpoint`.
    """
    with _reading(name, kind):
        config = json.loads(file_of(name, CONFIG).read_bytes())
        return _read_config(name, kind)[1] if isinstance(config, dict) and TARGET in config else None


def is_head(name: str) -> bool:
    """Whether a folder or a Hugging Face id is a checkpoint of this format, by its config; False if there is none."""
    try:
        config = json.loads(file_of(name, CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and TARGET in config


def _read_config(name: str, kind: str | None) -> tuple[dict[str, Any], TargetIdentity]:
    config: dict[str, Any] = json.loads(file_of(name, CONFIG).read_bytes())
    if not isinstance(config, dict) or not isinstance(identity := config.pop(TARGET, None), dict | None):
        raise TypeError("its config.json is no config of a drafter")
    if (found := config.get("model_type")) != (kind or found):
        raise ValueError(f"draft {name!r} has the model_type {found!r}: drafter {kind!r} needs one of its own")
    if identity is None or identity.keys() != TargetIdentity.__dataclass_fields__.keys():
        raise TypeError("its config.json names no target")
    return config, TargetIdentity(**identity)


@contextmanager
def _reading(name: str, kind: str | None) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        told = str(error).splitlines()[0]
        again = f" with `paradraft train {kind}`" if kind else ""
        raise ValueError(f"draft {name!r} cannot be read ({told}): train it again{again}") from None


def file_of(name: str, file: str) -> Path:
    """A file of a folder, or of a Hugging Face id."""
    if Path(name).is_file():
        raise NotADirectoryError("it is a file, and such a drafter is a folder")
    return Path(name) / file if Path(name).is_dir() else Path(hf_hub_download(name, file))

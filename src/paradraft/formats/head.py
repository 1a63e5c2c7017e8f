"""Checkpoint of a drafter that reads its target's hidden states; its config identifies that one target.

A folder with `config.json`, whose `model_type` is the drafter's name, and `model.safetensors`. Its config holds the
target's shape and a digest of its weights: it loads with no other shape, and with other weights, such as those of a
fine-tuned target, with a warning.
"""

from __future__ import annotations

import json
import warnings
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
"""Prefix of weight names in a folder exported for vLLM, and only there."""
TARGET = "target"
"""The key of the config that holds a `TargetIdentity`."""


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """Shape and weights digest that identify a target.

    Args:
        vocab_size: rows of its output head.
        weights: see `paradraft.digests.weights_digest`; None for random weights, which have no files.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    weights: str | None

    @classmethod
    def of(cls, config: PretrainedConfig, *, reads_weights: bool = True) -> TargetIdentity:
        """The identity of a model, from its config and, with `reads_weights`, its files."""
        return cls(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            weights=weights_digest(config.name_or_path) if config.name_or_path and reads_weights else None,
        )

    def differing(self, target: TargetIdentity) -> list[str]:
        """Names of what differs, where both know it."""
        both = {key: (own, getattr(target, key)) for key, own in vars(self).items()}
        return [key for key, pair in both.items() if None not in pair and pair[0] != pair[1]]

    def check(self, target: TargetIdentity, draft: str) -> None:
        """Raises ValueError if the loaded `target` has another shape; warns if only its weights differ.

        A drafter of the model that a target was tuned from drafts for it too, and verification keeps the text.

        Args:
            draft: for messages.
        """
        differing = self.differing(target)
        for key in differing:
            if key != "weights":
                raise ValueError(
                    f"draft {draft!r} was trained for another target, with {key}={getattr(self, key)}, and this one "
                    f"has {getattr(target, key)}: train one for this"
                )
        if differing:
            warnings.warn(
                f"draft {draft!r} was trained for other weights than this target's, and may guess less: "
                "`paradraft adapt` with this --target, or a training with it as `start`, fits it",
                stacklevel=2,
            )


@dataclass(frozen=True, kw_only=True)
class Head:
    """Contents of a checkpoint.

    Args:
        config: the drafter's settings, including `model_type`.
        name: of the folder, for messages.
    """

    config: dict[str, Any]
    target: TargetIdentity
    weights: dict[str, Tensor]
    name: str = ""

    def setting(self, key: str, kind: type[S], *allowed: S) -> S:
        """A setting; raises ValueError if it is missing, an int below 1, or not among `allowed` (default: any)."""
        value = self.config.get(key)
        if type(value) is not kind or (allowed and value not in allowed) or (type(value) is int and value < 1):
            raise ValueError(f"draft {self.name!r}: {key} in its config.json is {value!r}: train it again")
        return value

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A weight; raises ValueError if it is missing or has another shape."""
        weight = self.weights.get(name)
        if weight is None or weight.shape != shape:
            problem = "is missing" if weight is None else f"has the shape {tuple(weight.shape)}, not {shape}"
            raise ValueError(f"draft {self.name!r}: {name} {problem}: train it again")
        return weight


def write_head(folder: Path, head: Head) -> None:
    """Writes both files into an existing folder. Equal content gives equal bytes."""
    save_file({name: weight.cpu().contiguous() for name, weight in head.weights.items()}, folder / WEIGHTS)
    text = json.dumps(head.config | {TARGET: asdict(head.target)}, indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def read_head(name: str, kind: str, config: PretrainedConfig) -> Head:
    """Reads a checkpoint and checks that it belongs to a target.

    Args:
        name: a folder with a `config.json`, or a Hugging Face id.
        kind: the drafter's name, which `model_type` must equal.

    Raises:
        ValueError: it is of another drafter or for another target, or damaged.
    """
    head = read_checkpoint(name, kind)
    head.target.check(TargetIdentity.of(config), name)
    return head


def read_checkpoint(name: str, kind: str | None = None) -> Head:
    """Reads a checkpoint of a drafter (None: of any), not checking its target; raises ValueError as `read_head`."""
    with reading(name, kind):
        config, target = _read_config(name, kind)
        weights = {key.removeprefix(BODY): weight for key, weight in load_file(file_of(name, WEIGHTS)).items()}
        return Head(config=config, target=target, weights=weights, name=name)


def read_identity(name: str, kind: str) -> TargetIdentity | None:
    """The target in a checkpoint's config; None if it has another format. Raises ValueError as `read_checkpoint`."""
    with reading(name, kind):
        config = json.loads(file_of(name, CONFIG).read_bytes())
        return _read_config(name, kind)[1] if isinstance(config, dict) and TARGET in config else None


def is_head(name: str) -> bool:
    """Whether the config of a folder or Hugging Face id is of this format; False if there is no config."""
    try:
        config = json.loads(file_of(name, CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and TARGET in config


def kind_of(name: str) -> str:
    """The drafter's name in the config of a checkpoint of this format; raises ValueError as `read_checkpoint`."""
    with reading(name, None):
        return str(_read_config(name, None)[0].get("model_type"))


def trained_k(name: str) -> int | None:
    """Most tokens of a checkpoint's drafts, if its config has it; raises ValueError as `read_checkpoint`."""
    with reading(name, None):
        config = _read_config(name, None)[0]
    k = config.get("k", config.get("num_heads"))
    return k if type(k) is int and k > 0 else None


def _read_config(name: str, kind: str | None) -> tuple[dict[str, Any], TargetIdentity]:
    config: dict[str, Any] = json.loads(file_of(name, CONFIG).read_bytes())
    if not isinstance(config, dict) or not isinstance(identity := config.pop(TARGET, None), dict | None):
        raise TypeError("its config.json is no config of a drafter")
    if (model_type := config.get("model_type")) != (kind or model_type):
        raise ValueError(f"draft {name!r} has the model_type {model_type!r}: drafter {kind!r} needs one of its own")
    if identity is None or identity.keys() != TargetIdentity.__dataclass_fields__.keys():
        raise TypeError("its config.json names no target")
    return config, TargetIdentity(**identity)


@contextmanager
def reading(name: str, kind: str | None) -> Iterator[None]:
    """Turns errors of files into one line that names the draft."""
    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        problem = str(error).splitlines()[0]
        command = f" with `paradraft train {kind}`" if kind else ""
        raise ValueError(f"draft {name!r} cannot be read ({problem}): train it again{command}") from None


def file_of(name: str, file: str) -> Path:
    """A file of a folder, or of a Hugging Face id."""
    if Path(name).is_file():
        raise NotADirectoryError("it is a file, and such a drafter is a folder")
    return Path(name) / file if Path(name).is_dir() else Path(hf_hub_download(name, file))

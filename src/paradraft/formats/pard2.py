"""Checkpoint of a PARD-2 drafter (An et al. 2026): a PARD folder with the projection of the target's states.

Its keys and its file are those of AMD's code. A reader of PARD folders drafts without the states.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from io import BytesIO

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paradraft.formats.head import file_of

PROJECTION = "warp_model.bin"
"""The file with the projection, a pickled state dict."""
WEIGHT, BIAS = "target_proj.weight", "target_proj.bias"
SCALE = 0.02
"""AMD's factor on projected states."""
LAYERS = "pard2_target_layers"
DAMAGES = (OSError, EOFError, RuntimeError, KeyError, TypeError, AttributeError, pickle.UnpicklingError)
"""Errors of reading a file that is damaged or has other contents."""


@dataclass(frozen=True, kw_only=True)
class StateProjection:
    """The linear map from the target's states to what is added to the draft's embeddings.

    Args:
        layers: indices into `hidden_states` of `transformers`, of which the last one is after the final norm; negative
            ones count from the end.
        scale: factor on the map's output.
        weight: `[D, layers * S]`, for S numbers of a state.
        bias: `[D]`, if any.
    """

    layers: tuple[int, ...]
    scale: float
    weight: Tensor
    bias: Tensor | None = None

    def file(self) -> bytes:
        """The contents of the file; equal weights give equal bytes."""
        tensors = {WEIGHT: self.weight} | ({} if self.bias is None else {BIAS: self.bias})
        buffer = BytesIO()
        torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, buffer)
        return buffer.getvalue()

    def declare(self, config: PretrainedConfig) -> None:
        """Writes the keys into the config of a PARD model, in place."""
        config.spd_type, config.pard2 = "pard2", True
        config.pard2_scale, config.pard2_proj_bias = self.scale, self.bias is not None
        config.pard2_target_dim = self.weight.shape[1]
        setattr(config, LAYERS, list(self.layers))


def reads_states(config: PretrainedConfig) -> bool:
    """Whether a PARD model reads the target's states."""
    return hasattr(config, LAYERS)


def projection_file(config: PretrainedConfig) -> dict[str, bytes]:
    """The file of a model's projection, by its name; none for a model that reads no states."""
    if not reads_states(config):
        return {}
    return {PROJECTION: file_of(config.name_or_path, PROJECTION).read_bytes()}


def read_projection(config: PretrainedConfig, *, width: int) -> StateProjection:
    """Reads the projection of a PARD-2 model.

    Args:
        config: the draft's.
        width: S, of the target's states.

    Raises:
        ValueError: the model is no PARD-2 drafter, or one for targets of another width, or damaged.
    """
    name, layers = config.name_or_path, getattr(config, LAYERS, None)
    if layers is None:
        raise ValueError(f"draft {name!r} reads no states ({LAYERS} in config.json): use it with drafter pard")
    if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
        raise ValueError(f"draft {name!r}: {LAYERS} in its config.json is {layers!r}: train it again")
    scale = getattr(config, "pard2_scale", SCALE)
    if not isinstance(scale, float | int):
        raise ValueError(f"draft {name!r}: pard2_scale in its config.json is {scale!r}: train it again")
    try:
        tensors = torch.load(file_of(name, PROJECTION), map_location="cpu", weights_only=True)
        weight, bias = tensors[WEIGHT].float(), tensors.get(BIAS)
        is_finite = all(bool(tensor.isfinite().all()) for tensor in (weight, bias) if tensor is not None)
    except DAMAGES as error:
        reason = (str(error) or "it is empty").splitlines()[0]
        raise ValueError(f"draft {name!r}: its {PROJECTION} cannot be read ({reason}): train it again") from None
    outputs = config.hidden_size
    fits = weight.ndim == 2 and len(weight) == outputs and (bias is None or bias.shape == (outputs,))
    if not (is_finite and fits):
        raise ValueError(f"draft {name!r}: its {PROJECTION} does not fit its config.json: train it again")
    if weight.shape[1] != len(layers) * width:
        raise ValueError(
            f"draft {name!r} was trained for another target: it reads states of {weight.shape[1] / len(layers):g} "
            f"numbers, and this one has {width}: train one for this, or use drafter pard"
        )
    return StateProjection(layers=tuple(layers), scale=float(scale), weight=weight, bias=bias)

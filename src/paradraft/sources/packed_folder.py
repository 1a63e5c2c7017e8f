"""Loads folders of 4-bit GPTQ and AWQ models, with their packed weights as they are stored.

A linear layer has `qweight`, `qzeros` (int32, 8 values each) and `scales`. A weight is `scale * (value - zero)`, which
is `scale * value + offset` with an offset that is exact in float32. If every zero is 8, as in symmetric GPTQ, there are
no offsets.

Shape letters: N outputs, K inputs, G groups of inputs.

Source: AutoGPTQ's `qlinear_cuda.py`, AutoAWQ's `packing_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.formats.gguf_blocks import Blocks
from paradraft.models.architectures import FAMILIES, spec_of
from paradraft.sources.stored_weights import HEAD, Weight, assembled, lossless_dtype

METHODS = ("gptq", "awq")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of 8 outputs in an int32 of AWQ."""
_PACKED = ("qweight", "qzeros", "scales", "g_idx")
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which older folders describe their packing instead of in config.json, and the method."""
_SKIPPED = "-:"
"""Prefix of a pattern of layers that GPTQModel does not quantize."""
_COMPUTED = "rotary_emb.inv_freq"
"""A buffer that older folders store per layer; it is recomputed."""
_PER_NUMBER = 8
_MIDDLE = 8


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Format of packed weights.

    Args:
        method: one of `METHODS`.
        group: inputs per group; -1 for all.
        zeros_are_less: whether zeros are stored minus one, as in the first format of GPTQ.
    """

    method: str
    group: int
    zeros_are_less: bool


def packing_of(config: PretrainedConfig, name: str) -> Packing | None:
    """The format of a model's packed weights; None if they are not packed. Raises ValueError if it is unsupported."""
    if (description := _description_of(config, name)) is None:
        return None
    method, bits = description.get("quant_method"), description.get("bits", description.get("w_bit"))
    method = getattr(method, "value", method)
    if method not in METHODS or bits != 4:
        how = f"by {method!r}" if method not in METHODS else f"to {bits!r} bits by {method!r}"
        raise ValueError(
            f"{name!r} has weights that were rounded {how} (quantization_config), and only 4 bits of "
            f"{' and '.join(METHODS)} are read: use the model before that, or one of these, or a .gguf file"
        )
    layout, layouts = _layout(description, method), ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    if layout not in layouts:
        raise ValueError(f"{name!r} is packed by {method!r} as {layout!r}, and only {', '.join(layouts)} is read")
    if others := [pattern for pattern in description.get("dynamic") or () if not pattern.startswith(_SKIPPED)]:
        raise ValueError(
            f"{name!r} has layers that are packed in another way than the others (dynamic, {others[0]!r}), which is "
            "not read: use a model whose layers are packed alike, or a .gguf file"
        )
    group = description.get("group_size", description.get("q_group_size", -1))
    if type(group) is not int or not (group == -1 or (group > 0 and group % 32 == 0)):
        raise ValueError(f"{name!r}: group_size is {group!r} in its quantization_config: use a multiple of 32, or -1")
    if not spec_of(config).is_in_cpp:
        supported = ", ".join(family for family, spec in FAMILIES.items() if spec.is_in_cpp)
        raise ValueError(f"{name!r} is a {config.model_type} model packed by {method!r}; supported are {supported}")
    return Packing(method=method, group=group, zeros_are_less=layout == "gptq")


def _description_of(config: PretrainedConfig, name: str) -> dict[str, Any] | None:
    """A folder's quantization config: in its config, or in a separate file in older folders."""
    description = getattr(config, "quantization_config", None)
    if description is not None:
        return dict(description if isinstance(description, Mapping) else vars(description))
    for file, method in _FILES.items():
        if (path := Path(name) / file).is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                return {"quant_method": method, **stored}
            except (OSError, ValueError, TypeError) as error:
                raise ValueError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from None
    return None


def _layout(description: Mapping[str, Any], method: str) -> object:
    """The name of the packing layout, whose key depends on the version that wrote it."""
    if description.get("is_marlin_format"):
        return "marlin"
    keys = ("version", "checkpoint_format", "format") if method == "awq" else ("checkpoint_format", "format")
    layout = next((description[key] for key in keys if description.get(key)), "gemm" if method == "awq" else "gptq")
    return layout.lower() if isinstance(layout, str) else layout


def load(
    name: str, config: PretrainedConfig, packing: Packing, dtype: torch.dtype, *, attention: str
) -> tuple[PreTrainedModel, list[str]]:
    """Loads the model of a folder on the CPU, without its generation config.

    Args:
        config: of the model; its `quantization_config` is deleted.
        dtype: of activations and unpacked weights; float32 is used if bfloat16 would round one of these.

    Returns:
        The model, and the names of unused weights.

    Raises:
        ValueError: a weight is missing or does not fit.
    """
    with _tensors_of(name) as tensors:
        plain = [key for key in tensors if key.rpartition(".")[2] not in _PACKED and not key.endswith(_COMPUTED)]
        dtype = lossless_dtype((tensors[key] for key in plain), dtype)
        used = set[str]()

        def read(key: str) -> Weight | None:
            layer = key.rpartition(".")[0]
            if key in tensors:
                used.add(key)
                return tensors[key]
            if key != f"{layer}.weight" or f"{layer}.qweight" not in tensors:
                return None
            used.update(f"{layer}.{part}" for part in _PACKED)
            parts = {part: tensors[f"{layer}.{part}"] for part in _PACKED if f"{layer}.{part}" in tensors}
            try:
                return blocks_of(parts, packing)
            except ValueError as error:
                raise ValueError(f"{name!r}: {layer} {error}") from None

        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = assembled(config, read, name=name, dtype=dtype, attention=attention)
        unused = [key for key in tensors if key not in used and not _is_harmless(key, tensors, config)]
    return model, unused


def _is_harmless(key: str, tensors: Mapping[str, Tensor], config: PretrainedConfig) -> bool:
    """Whether an unused weight would change nothing, such as the zero bias that AutoGPTQ gives all layers."""
    is_embedding = key == HEAD and config.tie_word_embeddings
    return key.endswith(_COMPUTED) or is_embedding or (key.endswith(".bias") and not tensors[key].any())


def blocks_of(parts: Mapping[str, Tensor], packing: Packing) -> Blocks:
    """Unpacks `qweight`, `qzeros`, `scales` and, optionally, `g_idx` `[K]` of a linear layer.

    Raises:
        ValueError: the parts do not fit each other, or inputs are not in the order of their groups.
    """
    if missing := [part for part in ("qweight", "qzeros", "scales") if part not in parts]:
        raise ValueError(f"has no {missing[0]}")
    packed, scales_GN = parts["qweight"], parts["scales"]
    if packed.dtype != torch.int32 or parts["qzeros"].dtype != torch.int32:
        raise ValueError(f"is packed in {packed.dtype} and not in int32")
    if packing.method == "awq":
        values_KN = _unpacked(packed)[..., AWQ_ORDER].flatten(1)
        zeros_GN = _unpacked(parts["qzeros"])[..., AWQ_ORDER].flatten(1)
    else:
        values_KN = _unpacked(packed).transpose(1, 2).flatten(0, 1)
        zeros_GN = _unpacked(parts["qzeros"]).flatten(1)
        zeros_GN = zeros_GN + 1 & 15 if packing.zeros_are_less else zeros_GN
    inputs, outputs = values_KN.shape
    group = inputs if packing.group == -1 else packing.group
    if scales_GN.shape != zeros_GN.shape or scales_GN.shape != (-(-inputs // group), outputs):
        raise ValueError(
            f"has scales of shape {list(scales_GN.shape)}, and its {inputs} inputs and {outputs} outputs need "
            f"{[-(-inputs // group), outputs]}"
        )
    order_K = parts.get("g_idx")
    if order_K is not None and not torch.equal(order_K.long(), torch.arange(inputs) // group):
        raise ValueError(
            "has inputs in another order than their groups (desc_act, g_idx), which is not read: use a model that was "
            "rounded with desc_act=false, or a .gguf file"
        )
    scales_GN = scales_GN if scales_GN.dtype == torch.float16 else scales_GN.float()
    is_symmetric = bool((zeros_GN == _MIDDLE).all())
    values_KN = values_KN - _MIDDLE if is_symmetric else values_KN
    offsets_NG = None if is_symmetric else (-scales_GN.float() * zeros_GN).T.contiguous()
    return Blocks(
        values=values_KN.to(torch.int8).T.contiguous(), scales=scales_GN.T.contiguous(), offsets=offsets_NG, bits=4,
        group=group,
    )  # fmt: skip


def _unpacked(numbers: Tensor) -> Tensor:
    """The 8 values `[…, 8]` of each int32 `[…]`, the lowest 4 bits first."""
    return numbers[..., None] >> torch.arange(0, 4 * _PER_NUMBER, 4, dtype=torch.int32) & 15


class _Tensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by name, each read on access."""

    def __init__(self, files: list[Any]) -> None:
        self._files = {key: file for file in files for key in file.keys()}  # noqa: SIM118  # of safetensors

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _tensors_of(name: str) -> Iterator[_Tensors]:
    folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, allow_patterns="*.safetensors"))
    paths = sorted(folder.glob("model-*-of-*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{name!r} has no safetensors, and packed weights are read from no other files")
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        except SafetensorError as error:
            raise ValueError(f"cannot load model {name!r}: one of its files seems damaged ({error})") from None
        yield _Tensors(opened)

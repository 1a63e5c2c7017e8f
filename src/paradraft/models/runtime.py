"""Where and how models run: device, dtype, compilation; and weights in 8 or 4 bits, on GPUs through torchao."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paradraft.errors import is_out_of_memory
from paradraft.formats.gguf_blocks import Products
from paradraft.models.architecture import has_experts
from paradraft.models.quantized import GROUP, QuantizedTensor, round_linears

NF4_BLOCK, NF4_SCALES = 64, 256
"""Weights that share a scale in NF4, and scales that share one of theirs: those of QLoRA."""


def check_quantization(bits: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError, before anything is loaded, if there are no kernels for this: on CPUs there always are.

    Args:
        bits: 8 or 4.
        device: where the model is to run.
        dtype: what passes compute in.
    """
    if device.type == "cpu":
        return
    _torchao(bits)
    if bits == 4 and device.type != "cuda":
        raise ValueError(f"dtype='int4': torchao's kernels are for CUDA devices only, not for {device.type}: use int8")
    if bits == 4 and dtype != torch.bfloat16:
        raise ValueError("dtype='int4': torchao's kernels compute in bf16, which this GPU does not: use int8")


def quantize(model: PreTrainedModel, bits: int) -> None:
    """Rounds the weights of all linear layers, the head's too, in place.

    Embeddings and norms stay as they are. A head that was the embedding becomes a matrix of its own. On CPUs what is
    multiplied is rounded too, and the head and shared keys and values keep 8 bits; see `paradraft.models.quantized`.
    Elsewhere torchao rounds weights alone.

    Args:
        model: on the device it is to run on.
        bits: 8, a scale for each output; or 4, a scale for `GROUP` inputs.

    Raises:
        ValueError: torchao cannot do it.
    """
    if has_experts(model.config):
        raise ValueError(f"dtype='int{bits}': linear layers are rounded, and experts are none: use bfloat16")
    if model.device.type == "cpu":
        return round_linears(model, bits, model.get_output_embeddings())
    quantize_, config = _torchao(bits)
    try:
        quantize_(model, config)
    except (RuntimeError, NotImplementedError, ImportError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        device, reason = next(model.parameters()).device, str(error).strip().splitlines()[0]
        raise ValueError(
            f"dtype='int{bits}': torchao cannot do this to {model.config.name_or_path!r} on {device} ({reason}): use "
            "another dtype"
        ) from None


def _torchao(bits: int) -> tuple[Callable[[nn.Module, Any], None], Any]:
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError(f"dtype='int{bits}' needs torchao ({error}): pip install 'paradraft[quantized]'") from None
    # By default it would also change the settings that other models are compiled with.
    if bits == 8:
        return quantize_, Int8WeightOnlyConfig(set_inductor_config=False)
    packed = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return quantize_, packed


def store_in_nf4(model: PreTrainedModel, device: torch.device) -> None:
    """Stores the matrices of all layers in 4 bits (NF4, Dettmers et al. 2023, QLoRA), in place, and moves the model.

    Embeddings, norms and the head stay as they are. Unlike after `quantize`, gradients pass through on every device.

    Args:
        model: frozen.
        device: where it is to be; the whole matrices are there one by one.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        from torchao.quantization import to_nf4
    except ImportError as error:
        raise ValueError(f"nf4=true needs torchao ({error}): pip install 'paradraft[quantized]'") from None
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear) and (blocks := layer.weight.numel() / NF4_BLOCK).is_integer():
            stored = to_nf4(layer.weight.detach().to(device), NF4_BLOCK, math.gcd(int(blocks), NF4_SCALES))
            layer.weight = nn.Parameter(stored, requires_grad=False)
    model.to(device)


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a weight is stored in: itself, or the whole numbers and scales of a quantized one."""
    if isinstance(tensor, QuantizedTensor):
        numbers = [part for part in tensor.parts if part is not None]
        return [each for part in numbers for each in (part.tensors if isinstance(part, Products) else [part])]
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in stored_parts(getattr(tensor, name))]


def stored_bytes(tensor: torch.Tensor) -> int:
    """What a weight takes in memory; the element size of a quantized one would be the original's."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.stored_bytes
    return sum(part.numel() * part.element_size() for part in stored_parts(tensor))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
QUANTIZED = {"int8": 8, "int4": 4}
"""Names of weights that are rounded to few bits; passes compute in `Runtime.computed_in`."""
STORED = "stored"
"""Weights of few bits as a file has them; those of other models as with `AUTO`."""
PRECISIONS = (*DTYPES, *QUANTIZED, STORED)
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how models run; the same for target and draft.

    Args:
        device: a torch device name; "auto" is a GPU if there is one.
        dtype: of the weights, one of `PRECISIONS` or `SHORT`; "auto" is that of the checkpoint, or float32 where the
            device computes that one slowly. Weights that are stored in few bits stay so, and have no other.
        draft_dtype: the same for a draft model; None is `dtype`, but for weights that are stored in few bits.
        tokenizer: folder or Hugging Face id of the target's tokenizer; None for the one that comes with the target.
        compiled: compile the passes, also where that takes a minute or two: worth it for thousands of tokens. None
            compiles where it takes seconds, on CPUs in float32, bfloat16, int8 and int4; False never.
        capacity: most tokens of a row, prompt included; None takes the limit of the model, or of its draft if that is
            smaller. Caches grow with the texts.
        width: most tokens of one decoding pass.
        pad_to: least tokens of one decoding pass; passes in C++ need none.
        cuda_graphs: on a GPU, record compiled decoding passes and replay them.

    Raises:
        ValueError: an unknown dtype or device, or a dtype that cannot be had there.
    """

    device: str = AUTO
    dtype: str = AUTO
    draft_dtype: str | None = None
    tokenizer: str | None = None
    compiled: bool | None = None
    capacity: int | None = None
    width: int = 64
    pad_to: int = 1
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", precision_of(self.dtype))
        if self.draft_dtype is not None:
            object.__setattr__(self, "draft_dtype", precision_of(self.draft_dtype, "draft_dtype"))
        if self.device == AUTO:
            return
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError, ImportError, TypeError) as error:
            raise ValueError(f"device={self.device!r} cannot be used here: {str(error).splitlines()[0]}") from None
        if self.dtype in QUANTIZED:
            check_quantization(QUANTIZED[self.dtype], torch.device(self.device), self.computed_in)

    def settled(self, stored: torch.dtype | None) -> Runtime:
        """Without "auto".

        Args:
            stored: the dtype of the checkpoint; None if it does not say.
        """
        device = device_of(self.device)
        is_open = self.dtype in (AUTO, STORED)
        return replace(self, device=device, dtype=fast_dtype(stored, device) if is_open else self.dtype)

    @property
    def of_draft(self) -> Runtime:
        """That of a draft model."""
        return self if self.draft_dtype is None else replace(self, dtype=self.draft_dtype)

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype of activations and caches; with quantized weights bf16, or float32 where that is faster."""
        if self.dtype in DTYPES:
            return DTYPES[self.dtype]
        return torch.bfloat16 if computes_bf16(torch.device(device_of(self.device))) else torch.float32


def device_of(name: str) -> str:
    """A device, in place of "auto" a GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == AUTO else name


def precision_of(name: object, setting: str = "dtype") -> str:
    """The full name of a dtype, or "auto".

    Args:
        name: as it was given.
        setting: for what, for the message.

    Raises:
        ValueError: there is none of this name.

    >>> precision_of("bf16"), precision_of("int8"), precision_of("auto")
    ('bfloat16', 'int8', 'auto')
    """
    found = SHORT.get(name, name) if isinstance(name, str) else name
    if found not in (AUTO, *PRECISIONS):
        raise ValueError(f"{setting}={name!r}: use one of {', '.join((AUTO, *PRECISIONS, *SHORT))}")
    return str(found)


def fast_dtype(stored: torch.dtype | None, device: str) -> str:
    """The name of a checkpoint's dtype, if it is not many times slower than float32 on a device."""
    kind = torch.device(device)
    is_slow = (stored == torch.float16 and kind.type == "cpu") or (
        # Passes in C++ read bf16 in any case, and compute in float32 where the CPU has nothing better.
        stored == torch.bfloat16 and not computes_bf16(kind) and not (kind.type == "cpu" and sys.platform == "linux")
    )
    names = {dtype: name for name, dtype in DTYPES.items()}
    return "float32" if is_slow or stored is None else names.get(stored, "float32")


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16; a CPU without them is many times slower in bf16 than in float32."""
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return True

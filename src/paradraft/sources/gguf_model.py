"""Loads a causal LM from a GGUF file: its config, and its weights as they are stored.

Query and key rows of Llama files are ordered differently from `transformers`, because llama.cpp rotates neighbouring
pairs; a permutation of rows is exact for every weight type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.formats.gguf import GgufFile, read_gguf
from paradraft.formats.gguf_blocks import KINDS, Blocks, unpacked
from paradraft.models.architectures import spec_of
from paradraft.models.quantized import Parts, QuantizedTensor
from paradraft.sources.gguf_config import EMBEDDING, HEAD, ROPE, config_of, generation_config_of, numbers_of
from paradraft.sources.stored_weights import Weight, assembled, lossless_dtype, quantized

OUTER = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Names of a layer's parts in `transformers`, by their GGUF names."""


def names_of(layers: int) -> Iterator[tuple[str, str]]:
    """Names of all tensors that a model may have, as (GGUF, `transformers`)."""
    yield from OUTER.items()
    for layer in range(layers):
        for theirs, ours in INNER.items():
            for part in ("weight", "bias"):
                yield f"blk.{layer}.{theirs}.{part}", f"model.layers.{layer}.{ours}.{part}"


def has_few_bits(file: GgufFile) -> bool:
    """Whether any weights of a file are quantized."""
    return any(KINDS[tensor.kind].unpack is not None for tensor in file.tensors.values())


def resident_bytes(file: GgufFile, itemsize: int) -> int:
    """Bytes of the weights in memory: quantized ones as in the file, others at `itemsize` bytes per number."""
    return sum(
        tensor.size_bytes if KINDS[tensor.kind].unpack is not None else math.prod(tensor.shape) * itemsize
        for tensor in file.tensors.values()
    )


def load(name: str, dtype: torch.dtype, *, attention: str) -> PreTrainedModel:
    """Loads the model of a file on the CPU.

    Args:
        dtype: of activations and unquantized weights; in quantized models float32 if bfloat16 would round one of these.

    Raises:
        ValueError: see `config_of`; or a weight is missing or has another shape.
    """
    file, config = read_gguf(name), config_of(name)
    theirs = {ours: their for their, ours in names_of(config.num_hidden_layers) if their in file.tensors}
    if has_few_bits(file):
        plain = [tensor for tensor in theirs.values() if KINDS[file.tensors[tensor].kind].unpack is None]
        dtype = lossless_dtype((numbers_of(file, tensor) for tensor in plain), dtype)

    def read(ours: str) -> Weight | None:
        if ours not in theirs:
            return None
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(ours.split(".")[-2])
        order = None
        if heads is not None and spec_of(config).has_gguf_pairs:
            order = row_order(heads, config.head_dim)
        return _stored(file, theirs[ours], order, dtype)

    model = assembled(config, read, name=name, dtype=dtype, attention=attention)
    used = {theirs.get(key) for key, _ in model.named_parameters()}
    if unused := sorted({*file.tensors} - used - {ROPE}):
        raise ValueError(
            f"{name!r} has the tensor {unused[0]}, which a {config.model_type} model has not: it is another kind of "
            "model than it says, use a model's folder"
        )
    model.generation_config = generation_config_of(name)
    return model


def row_order(heads: int, size: int) -> Tensor:
    """The index in a Llama file of each query or key row, in the order of `transformers`.

    >>> row_order(1, 6).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()


def _stored(file: GgufFile, name: str, order: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A tensor of a file; a quantized one is unpacked lazily.

    Args:
        order: of its rows; None for the file's order.
        dtype: of products with quantized weights.
    """
    tensor = file.tensors[name]
    if order is not None and len(order) != tensor.shape[0]:
        order = None  # the shape contradicts the config, which the caller reports
    if KINDS[tensor.kind].unpack is None:
        numbers = numbers_of(file, name)
        return numbers if order is None else numbers[order]
    rows = _StoredRows(file=file, name=name, order=order)
    first = quantized(rows.blocks([0]), dtype)
    return QuantizedTensor.elsewhere(rows, tensor.shape, format=first.format, group=first.group, dtype=dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StoredRows:
    """Quantized weights that are read and unpacked on demand; see `_stored`."""

    file: GgufFile
    name: str
    order: Tensor | None

    def blocks(self, rows: list[int] | None = None) -> Blocks:
        """Unpacks some rows, by their index in the file, or all."""
        weights = unpacked(self.file.tensors[self.name].kind, self.file.bytes_of(self.name, rows))
        assert isinstance(weights, Blocks)
        return weights

    def __call__(self) -> Parts:
        """All parts."""
        blocks = self.blocks(None if self.order is None else self.order.tolist())
        return blocks.values, blocks.scales, blocks.offsets

    def rows(self, outputs: Tensor) -> Tensor:
        """See `HasRows`."""
        rows = outputs if self.order is None else self.order[outputs]
        return quantized(self.blocks(rows.tolist()), torch.float32).dequantize()

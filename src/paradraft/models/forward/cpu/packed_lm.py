"""The weights of a model as a pass in C++ reads them: packed once, in the order in which they are read."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paradraft.models.architectures import head_size
from paradraft.models.forward.cpu.matrix import Matrix, PackedMatrix
from paradraft.models.forward.cpu.packed_changes import Change
from paradraft.models.quantized import QuantizedTensor

LOG = logging.getLogger(__name__)


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix * 3),
        *((name, Matrix) for name in ("output", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "post_attention_norm", "query_norm", "key_norm")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden_size", "intermediate", "heads", "kv_heads", "head_size")),
        *((name, ctypes.c_int64) for name in ("layers", "vocabulary", "is_bfloat16")),
        ("epsilon", ctypes.c_float), ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "final_norm", "embedding", "embedding_bfloat16")),
        ("embedding_integers", ctypes.POINTER(Matrix)),
        ("head", Matrix), ("layer", ctypes.POINTER(_Layer)), ("added", ctypes.c_void_p), ("added_rows", ctypes.c_int64),
        ("changes", ctypes.POINTER(Change)), ("change_count", ctypes.c_int64), ("is_exact", ctypes.c_int64),
    )  # fmt: skip


class PackedLM:
    """The struct that the C++ reads, and the tensors that it points to; those that are not packed already are copied.

    Args:
        model: supported by `can_serve`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._kept: list[Tensor] = []
        self.matrices: list[PackedMatrix] = []
        self._packed: dict[int, tuple[PackedMatrix, int]] = {}
        config, body = model.config, model.model
        layers = []
        for index, layer in enumerate(body.layers, 1):
            LOG.info("%s: packing layer %d of %d", Path(model.name_or_path).name, index, len(body.layers))
            layers.append(self._layer(layer))
        head = self._matrix([model.lm_head])
        self.head = self.matrices[-1]
        embedding = self._embedding(body.embed_tokens.weight, model.lm_head.weight)
        self.struct = _Model(
            hidden_size=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
            layers=len(layers),
            vocabulary=len(body.embed_tokens.weight),
            is_bfloat16=model.dtype == torch.bfloat16,
            epsilon=config.rms_norm_eps,
            scale=body.layers[0].self_attn.scaling,
            final_norm=self._floats(body.norm.weight),
            head=head,
            layer=(_Layer * len(layers))(*layers),
            **embedding,
        )

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor that lives as long as the struct."""
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor

    def _floats(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.keep(tensor.float()).data_ptr()

    def _matrix(self, linears: Sequence[nn.Linear]) -> Matrix:
        """Packs linear layers with the same inputs as one matrix."""
        packed, first = PackedMatrix([each.weight for each in linears], [each.bias for each in linears]), 0
        self.matrices.append(packed)
        for each in linears:
            self._packed[id(each.weight)] = packed, first
            first += len(each.weight)
        return packed.matrix

    def _qkv(self, linears: Sequence[nn.Linear]) -> Any:
        """Packs the projections of queries, keys and values; consecutive ones of one format are one matrix."""
        by_format = groupby(linears, lambda each: getattr(each.weight, "format", None))
        return (Matrix * 3)(*(self._matrix([*group]) for _, group in by_format))

    def _embedding(self, weight: Tensor, head: Tensor) -> dict[str, Any]:
        """The embedding's address, by its field in the struct."""
        if isinstance(weight, QuantizedTensor):
            # A tied output head is packed already.
            packed = self.head if weight is head else PackedMatrix([weight])
            self.matrices.append(packed)
            self._packed[id(weight)] = packed, 0
            return {"embedding_integers": ctypes.pointer(packed.matrix)}
        name = "embedding_bfloat16" if weight.dtype == torch.bfloat16 else "embedding"
        return {name: self.keep(weight).data_ptr()}

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return _Layer(
            qkv=self._qkv([attention.q_proj, attention.k_proj, attention.v_proj]),
            output=self._matrix([attention.o_proj]),
            gate=self._matrix([mlp.gate_proj]),
            up=self._matrix([mlp.up_proj]),
            down=self._matrix([mlp.down_proj]),
            norm=self._floats(layer.input_layernorm.weight),
            post_attention_norm=self._floats(layer.post_attention_layernorm.weight),
            query_norm=self._floats(query_norm and query_norm.weight),
            key_norm=self._floats(key_norm and key_norm.weight),
        )

    def packed(self, weight: Tensor) -> tuple[PackedMatrix, int]:
        """The packed matrix of a weight, and the index there of the weight's first output."""
        return self._packed[id(weight)]

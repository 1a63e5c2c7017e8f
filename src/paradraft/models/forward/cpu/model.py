"""Forward pass in C++ for CPUs: one call per pass, over weights packed in the order in which they are read.

Arithmetic is float32. Weights that bfloat16 represents exactly, as nearly all published ones, are stored as bfloat16
also in a float32 model, so half as much is read. In a bfloat16 model activations are rounded to bfloat16 too, as by the
model's own code, on CPUs that have instructions for it: passes over many tokens take half the time.

Shape letters as in `causal_lm.py`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.models import kv_cache
from paradraft.models.architectures import head_size, spec_of
from paradraft.models.config_check import STATIC_ROPES
from paradraft.models.forward import FINAL_NORM, ForwardOut
from paradraft.models.forward.cpu.build import kernel_names, library
from paradraft.models.forward.cpu.matrix import KINDS, PackedMatrix, is_known, packed_dtype
from paradraft.models.forward.cpu.own_code import Course
from paradraft.models.forward.cpu.packed_changes import PackedChanges
from paradraft.models.forward.cpu.packed_lm import PackedLM
from paradraft.models.forward.cpu.self_check import check
from paradraft.models.forward.cpu.threads import granted_threads
from paradraft.models.forward.gated import GatedChange
from paradraft.models.quantized import QuantizedTensor, rounded_inputs

PLAIN, OWN = ("Linear", "Embedding", "SiLU", "SiLUActivation"), ("RMSNorm", "RotaryEmbedding")
"""Types of leaf modules, those of the family without its name; an adapter has others."""
PROFILED_AS = "paradraft::pass"
LOG = logging.getLogger(__name__)
DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of a model."""


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "wanted", "slots")),
        *((name, ctypes.c_void_p) for name in ("ids", "parents", "lengths", "places", "keys", "values", "logits")),
        *((name, ctypes.c_void_p) for name in ("vectors", "states")),
    )


def can_serve(model: PreTrainedModel) -> bool:
    """Whether the C++ supports a model and this system."""
    config: PretrainedConfig = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        sys.platform == "linux"
        and model.device.type == "cpu"
        and model.dtype in DTYPES
        and spec_of(config).is_in_cpp
        and all(_is_plain(module, type(model.model.layers[0])) for module in model.modules())
        and config.hidden_act == "silu"
        and rope in STATIC_ROPES
        and head_size(config) % 2 == 0
        and all(map(is_known, (*model.parameters(), *model.buffers())))
    )


def _is_plain(module: nn.Module, layer: type[nn.Module]) -> bool:
    """Whether a module has no hook and is no adapter; a norm or rotary embedding is from the file of the layers."""
    is_part = next(module.children(), None) is None
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    kind = type(module)
    is_own = kind.__name__.endswith(OWN) and kind.__module__ == layer.__module__
    return not has_hooks and (not is_part or is_own or kind.__name__ in PLAIN)


class NativePass:
    """The forward pass of a model in C++.

    The weights must not change afterwards, because those that are not packed already are copied.

    Args:
        model: supported by `can_serve`.
        threads: most threads of a pass; by default `granted_threads()` at the time of loading.
        probe: the `probe` of an equal pass that has passed its self-check, which is not repeated then.

    Raises:
        CannotBuildError: there is no library for this machine.
        WrongPassError: it fails its self-check.
        OtherLogitsError: it has another `probe`.
    """

    min_rows = 1
    warm_up_rounds = 0
    is_native = True

    def __init__(self, model: PreTrainedModel, *, threads: int | None = None, probe: str | None = None) -> None:
        self._library = library()
        self.threads = granted_threads() if threads is None else threads
        self._added: Tensor | None = None
        self._weights = PackedLM(model)
        self._model = self._weights.struct
        self._config = model.config
        self._rotary: nn.Module = model.model.rotary_emb
        self._vocab_rows = len(model.lm_head.weight)
        kinds = {packed.matrix.kind for packed in self._weights.matrices}
        self._rounds = model.dtype == torch.bfloat16 and kinds == {KINDS[torch.bfloat16]}
        self._new_scratch()
        self._rotations = torch.empty(0), torch.empty(0)
        self._storage: kv_cache.Storage = []
        self._pointers: list[ctypes.Array[ctypes.c_void_p]] = []
        LOG.info("%s: comparing its pass with the model's own code", Path(model.name_or_path).name)
        self.probe = self._check(model, probe)
        """A digest of the logits of a few tokens."""

    def head(self, states: Tensor) -> Tensor:
        """See `Forward`."""
        return self.product(self._weights.head, states)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """See `Forward`; outputs are float32."""
        return partial(self.product, PackedMatrix([weight], [bias]))

    def product(self, matrix: PackedMatrix, inputs: Tensor) -> Tensor:
        """`[M, outputs]` of `[M, inputs]`, with inputs rounded as in a pass."""
        outputs = torch.empty(len(inputs), matrix.matrix.outputs, dtype=torch.float32, device="cpu")
        dtype = torch.bfloat16 if self._rounds_to_bfloat16(matrix) else torch.float32
        matrix.multiply(inputs.to(dtype).contiguous(), outputs, self.threads)
        return outputs

    def _rounds_to_bfloat16(self, matrix: PackedMatrix) -> bool:
        return self._rounds and matrix.matrix.kind == KINDS[torch.bfloat16] and "bf16" in kernel_names()

    def rounded(self, matrix: PackedMatrix, inputs: Tensor) -> Tensor:
        """The rounded inputs that `product` multiplies with a matrix, as float32."""
        if matrix.matrix.kind == KINDS[torch.int8]:
            blocks_MBI, scales_MB = rounded_inputs(inputs)
            return (blocks_MBI * scales_MB[:, :, None]).flatten(1)[:, : inputs.shape[1]]
        return inputs.bfloat16().float() if self._rounds_to_bfloat16(matrix) else inputs.float()

    def packed(self, weight: Tensor) -> tuple[PackedMatrix, int]:
        """See `PackedLM`."""
        return self._weights.packed(weight)

    def weight_bytes(self, weight: Tensor) -> int:
        """Bytes that a pass reads of a weight of the model, scales and offsets included."""
        if isinstance(weight, QuantizedTensor):
            return weight.stored_bytes
        return weight.numel() * (packed_dtype(weight) if weight.ndim == 2 else torch.float32).itemsize

    def __call__(
        self,
        storage: kv_cache.Storage,
        lengths: list[int],
        tokens_BN: Tensor,
        parents_BN: Tensor,
        *,
        logit_rows: Tensor,
        hidden_layers: Sequence[int] = (),
        vectors: Tensor | None = None,
    ) -> ForwardOut:
        """See `Forward`; logits and states are float32. States after the final norm are as the head reads them: rounded
        in a bfloat16 model, on CPUs with products of bfloat16."""
        (B, N), R = tokens_BN.shape, logit_rows.shape[1]
        logits = torch.empty(B, R, self._vocab_rows, dtype=torch.float32, device="cpu")
        if storage is not self._storage:
            self._rotate(kv_cache.slots_of(storage))
            self._storage, addresses = storage, ctypes.c_void_p * len(storage)
            self._pointers = [addresses(*(layer[part].data_ptr() for layer in storage)) for part in (0, 1)]
        keys, values = map(ctypes.addressof, self._pointers)
        assert all(tensor.dtype == torch.long for tensor in (tokens_BN, parents_BN, logit_rows))
        assert len(storage[0][0]) == len(lengths) == len(logit_rows) == B and parents_BN.shape == (B, N)
        integers = [tensor.contiguous() for tensor in (tokens_BN, parents_BN, logit_rows)]
        ids, parents, wanted = (tensor.data_ptr() for tensor in integers)
        lengths_B = (ctypes.c_int64 * B)(*lengths)
        hidden, states = self._states(B, N, hidden_layers) if hidden_layers else ({}, None)
        if vectors is not None:
            assert vectors.shape == (B, N, self._model.hidden_size)
            vectors = vectors.float().contiguous()
        batch = _Batch(
            rows=B, tokens=N, wanted=R, slots=kv_cache.slots_of(storage), ids=ids, parents=parents, places=wanted,
            lengths=ctypes.addressof(lengths_B), keys=keys, values=values, logits=logits.data_ptr(),
            vectors=None if vectors is None else vectors.data_ptr(),
            states=None if states is None else ctypes.addressof(states),
        )  # fmt: skip
        # A profiler sees only torch's functions, so it needs a label; without a profiler that would cost microseconds.
        is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # torch does not export it
        with torch.profiler.record_function(PROFILED_AS) if is_profiled else nullcontext():
            is_wrong = self._library.forward(
                ctypes.byref(self._model), ctypes.byref(batch), self._scratch, self.threads
            )
        assert not is_wrong, "a token, a parent or a wanted place is outside of its range"
        return ForwardOut(logits=logits, hidden=hidden)

    def _rotate(self, positions: int) -> None:
        """Computes the rotary embedding for this many positions, unless there is one for more."""
        if positions > len(self._rotations[0]):
            angles = self._rotary(
                torch.zeros(1, dtype=torch.float32, device="cpu"), torch.arange(positions, device="cpu")[None]
            )
            half = self._model.head_size // 2
            cosines, sines = (each[0, :, :half].detach().contiguous() for each in angles)
            self._rotations = cosines, sines
            self._model.cosines, self._model.sines = cosines.data_ptr(), sines.data_ptr()

    def _states(
        self, batch_size: int, tokens: int, layers: Sequence[int]
    ) -> tuple[dict[int, Tensor], ctypes.Array[ctypes.c_void_p]]:
        """Buffers for the states of some layers, and the address of each layer's."""
        shape, count = (batch_size, tokens, self._model.hidden_size), self._model.layers
        hidden = {layer: torch.empty(shape, dtype=torch.float32, device="cpu") for layer in layers}
        addresses = (ctypes.c_void_p * (count + 2))()
        for layer, states in hidden.items():
            assert FINAL_NORM <= layer <= count
            addresses[count + 1 if layer == FINAL_NORM else layer] = states.data_ptr()
        return hidden, addresses

    def add_embeddings(self, rows_PD: Tensor, changes: Sequence[tuple[range, GatedChange]] = ()) -> None:
        """See `Forward`."""
        self._added = rows_PD.detach().to("cpu", torch.float32).contiguous()
        self._model.added, self._model.added_rows = self._added.data_ptr(), len(rows_PD)
        dtype = torch.bfloat16 if self._model.is_bfloat16 else torch.float32
        self._changes = PackedChanges([(ids, change.on(torch.device("cpu"), dtype)) for ids, change in changes])
        self._model.changes, self._model.change_count = self._changes.array, len(changes)

    def first(self, layers: int) -> Self:
        """See `Forward`; it shares the packed weights."""
        view = copy(self)
        view._model = type(self._model).from_buffer_copy(self._model)
        view._model.layers = layers
        view._new_scratch()
        view.forget()
        return view

    def _new_scratch(self) -> None:
        self._scratch = self._library.new_scratch()
        weakref.finalize(self, self._library.delete_scratch, self._scratch)

    def forget(self) -> None:
        """See `Forward`."""
        self._storage, self._pointers = [], []

    def logits_at(
        self, tokens_N: Tensor, positions_N: Tensor, *, exactly: bool = False, parts: Sequence[int] = ()
    ) -> Tensor:
        """The logits `[N, V]` of one text at ascending positions, with or without gaps.

        Args:
            exactly: without rounding of activations; slow, for comparison.
            parts: tokens of each of several passes; one pass by default.
        """
        count, self._model.is_exact = len(tokens_N), exactly
        dtype = torch.float32 if exactly else self._stored_dtype
        try:
            passes = self._passes_at(self._storage_for(tokens_N, dtype), tokens_N, positions_N, parts or [count])
            return torch.cat([out.logits[0] for out in passes])
        finally:
            self._model.is_exact = False

    def course_of(self, tokens_N: Tensor, positions_N: Tensor) -> Course:
        """The intermediate results of the pass of `logits_at`."""
        layers = range(self._model.layers + 1)
        storage = self._storage_for(tokens_N, self._stored_dtype)
        (out,) = self._passes_at(storage, tokens_N, positions_N, [len(tokens_N)], layers)
        keys, values = (torch.cat(each).transpose(1, 2).float() for each in zip(*storage, strict=True))
        return Course(torch.cat([out.hidden[layer] for layer in layers]), keys, values)

    def as_stored(self, numbers: Tensor) -> Tensor:
        """Keys or values as the cache holds them, as float32."""
        return numbers.to(self._stored_dtype).float()

    @property
    def _stored_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._model.is_bfloat16 else torch.float32

    def _storage_for(self, tokens_N: Tensor, dtype: torch.dtype) -> kv_cache.Storage:
        devices = [torch.device("cpu")] * self._config.num_hidden_layers
        return kv_cache.allocate(self._config, batch_size=1, capacity=len(tokens_N), dtype=dtype, devices=devices)

    def _passes_at(
        self,
        storage: kv_cache.Storage,
        tokens_N: Tensor,
        positions_N: Tensor,
        parts: Sequence[int],
        layers: Sequence[int] = (),
    ) -> list[ForwardOut]:
        self._rotate(int(positions_N[-1]) + 1)
        rotations = [each[positions_N].contiguous() for each in self._rotations]
        self._model.cosines, self._model.sines = (each.data_ptr() for each in rotations)
        outs, done = [], 0
        try:
            for part in parts:
                indices_BN = torch.arange(part, device="cpu")[None]
                tokens_BN = tokens_N[None, done : done + part]
                outs.append(
                    self(storage, [done], tokens_BN, indices_BN - 1, logit_rows=indices_BN, hidden_layers=layers)
                )
                done += part
            return outs
        finally:
            self._model.cosines, self._model.sines = (each.data_ptr() for each in self._rotations)
            self.forget()

    def _check(self, model: PreTrainedModel, probe: str | None) -> str:
        return check(model, self, probe)

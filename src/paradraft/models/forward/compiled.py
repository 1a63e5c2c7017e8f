"""Forward pass through `torch.compile`, compiled once for all shapes.

Shape letters as in `eager.py`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeVar

import torch
import torch.fx.experimental._config as sizes_config
from torch import Tensor, nn
from transformers import PreTrainedModel

from paradraft.models import kv_cache
from paradraft.models.forward.eager import EagerPass, Layers, NewTokens, PassFunction, logits_and_states_of
from paradraft.models.forward.gated import GatedChange

Result = TypeVar("Result")
MOST_KEPT_BYTES = 2**30
"""Largest model whose compiled pass is cached on disk: on a CPU its packed weights are part of it."""


class CompiledPass(EagerPass):
    """The eager pass, compiled for one row and for several, for each choice of hidden layers and kinds of inputs.

    These choices are compiled in, so a pass without hidden layers, vectors and added embeddings does not pay for them.

    Args:
        model: in evaluation mode; its weights must not change afterwards, because compiled passes have copies.
        pad_to: see `EagerPass`.
        cuda_graphs: see `EagerPass`.
    """

    min_rows = 2

    def __init__(self, model: PreTrainedModel, *, pad_to: int, cuda_graphs: bool) -> None:
        # A pass of one token would be compiled separately: torch.compile takes sizes 0 and 1 for constants.
        super().__init__(model, pad_to=max(pad_to, 2), cuda_graphs=cuda_graphs)
        self._compiled: dict[tuple[Layers, bool, bool, bool], PassFunction] = {}
        self.warm_up_rounds = 1 if self.replays is None else 2

    def add_embeddings(self, rows_PD: Tensor, changes: Sequence[tuple[range, GatedChange]] = ()) -> None:
        """See `Forward`."""
        super().add_embeddings(rows_PD, changes)
        for key in [key for key in self._compiled if key[2]]:
            del self._compiled[key]

    def first(self, layers: int) -> Self:
        """See `Forward`; compiled apart too. On a CPU the compiled pass has a copy of its weights."""
        view = super().first(layers)
        view._compiled = {}
        return view

    def _read(self, storage: kv_cache.Storage, lengths: list[int], layers: Layers, new: NewTokens) -> Sequence[Tensor]:
        return self._computed(storage, lengths, layers, new)

    def _function(self, layers: Layers, new: NewTokens) -> PassFunction:
        added = self._added_in(new)
        changes = added is not None and added.projections is not None
        key = (layers, new.vectors is not None, added is not None, changes)
        if key not in self._compiled:
            self._compiled[key] = compile_pass(logits_and_states_of(layers), self._model)
        return self._compiled[key]


def compile_pass(function: Callable[..., Result], model: nn.Module) -> Callable[..., Result]:
    """Compiles a pass by `torch.compile`, for any sizes; falls back to eager, with a warning, where that fails.

    On a CPU the weights are packed ("freezing"; they must not change afterwards) and everything is called from C++.
    Matrix products are compiled too, because a call of a library's takes 25 µs, longer than a small model's product.
    The result is in torch's cache on disk. `model` is the first argument of every call.
    """
    weight = next(model.parameters())
    is_whole = all(type(tensor) is nn.Parameter for tensor in model.parameters())
    tag = _tag(model) if weight.device.type == "cpu" else ""
    # Not shared between models, because no guard is left that tells one model from another. One graph, because a piece
    # that was compiled for a layer would be taken for another layer's.
    fast = torch.compile(  # type: ignore[call-overload]  # torch 2.13 forgets `isolate_recompiles` in its overloads
        function, fullgraph=True, dynamic=True, isolate_recompiles=True, options={"guard_filter_fn": _on_inputs}
    )
    seen: set[tuple[torch.Size, ...]] = set()
    works = True

    def run(*args: Any) -> Result:
        nonlocal works
        if not works:
            return function(*args)
        sizes = tuple(arg.shape for arg in args if isinstance(arg, Tensor))
        if sizes in seen:
            return fast(*args)
        try:
            with _settings(weight.device, weight.dtype if is_whole else None, tag):
                result = fast(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            works = False
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"compilation failed, decoding goes on uncompiled: {reason}", stacklevel=2)
            return function(*args)
        seen.add(sizes)
        return result

    return run


def _tag(model: nn.Module) -> str | None:
    """A digest of a model's tensors for torch's cache on disk; None if they are quantized or too large to cache.

    Torch's own key is the same for all models of the same shapes, although the cached graph has the packed weights of
    one of them, and for all CPUs, whatever their vector instructions. Buffers such as the frequencies of the rotary
    embedding, which no `state_dict` has, are frozen like weights.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(type(tensor) not in (nn.Parameter, Tensor) for tensor in tensors):
        return None
    if sum(tensor.nbytes for tensor in tensors) > MOST_KEPT_BYTES:
        return None
    digest = hashlib.sha256(torch.backends.cpu.get_cpu_capability().encode())
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _settings(device: torch.device, dtype: torch.dtype | None, tag: str | None) -> Iterator[None]:
    """Settings of a compilation. Because they cost 50 µs, they are set only where a pass may be compiled.

    `dtype` is that of the weights; None if they are quantized, for which Inductor's own products are incomplete.
    """
    on_cpu = device.type == "cpu"
    # torch gives its config modules `patch` only when they are imported, where a type checker does not see it.
    own_products = on_cpu and dtype in (torch.float32, torch.bfloat16, torch.float16)
    with ExitStack() as settings:
        settings.enter_context(torch.compiler.config.patch(cache_key_tag=tag or ""))  # type: ignore[attr-defined]  # see above
        # Sizes that are equal in the first pass stay separate, else it is compiled again when they differ.
        settings.enter_context(sizes_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]  # see above
        # Floats such as the attention's scale never change; as variables they would cost a second tracing.
        settings.enter_context(torch._dynamo.config.patch(specialize_float=True))
        settings.enter_context(
            torch._inductor.config.patch(
                fx_graph_cache=tag is not None,
                freezing=on_cpu,
                cpp_wrapper=on_cpu,
                max_autotune=own_products,
                max_autotune_gemm_backends="CPP" if own_products else "ATEN",
            )
        )
        if on_cpu:
            # Else the weights are packed for oneDNN, only to be unpacked again, and torch does not cache such a graph.
            settings.enter_context(_without_onednn())
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Filters the guards of every pass: keeps those on inputs, drops the hundreds on the model."""
    return [
        guard.guard_type == "SHAPE_ENV" or (guard.guard_type == "TENSOR_MATCH" and not guard.name.startswith("model"))
        for guard in guards
    ]

"""Compiles a forward pass once for all its shapes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as sizes_config
from torch import Tensor, nn

MOST_KEPT_BYTES = 2**30
"""Largest model of which a compiled pass is kept on disk: on a CPU its packed weights are part of it."""


def compile_pass(function: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    """A pass through `torch.compile`, for any sizes; eager, with a warning, where that fails.

    On a CPU the weights are packed ("freezing"; they must not change afterwards) and everything is called from C++.
    The matrix products are compiled too: the libraries' need 25 µs for each call, which is longer than a small
    model's products take. What was compiled is kept on disk, where torch keeps it.

    Args:
        function: what to compile.
        model: what every call computes with.
    """
    weight = next(model.parameters())
    is_whole = all(type(tensor) is nn.Parameter for tensor in model.parameters())
    tag = _tag(model) if weight.device.type == "cpu" else ""
    # Not shared between models, because nothing is left in the guards that tells one model from another.
    fast = torch.compile(  # type: ignore[call-overload]  # torch 2.13 forgets `isolate_recompiles` in its overloads
        function, dynamic=True, isolate_recompiles=True, options={"guard_filter_fn": _on_inputs}
    )
    seen: set[tuple[torch.Size, ...]] = set()
    works = True

    def run(*args: Any) -> Tensor:
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
    """What tells a model's tensors from others of the same shapes; None if they are too large to be kept, or quantized.

    Torch takes what it has kept for any model of the same shapes, and finds the packed weights of another in it.
    Buffers such as the frequencies of the rotary embedding, which no `state_dict` has, are frozen like weights. Nor
    does torch's key say which vector instructions the CPU had.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(type(tensor) not in (nn.Parameter, Tensor) for tensor in tensors):
        return None
    if sum(tensor.nbytes for tensor in tensors) > MOST_KEPT_BYTES:
        return None
    found = hashlib.sha256(torch.backends.cpu.get_cpu_capability().encode())
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@contextmanager
def _settings(device: torch.device, dtype: torch.dtype | None, tag: str | None) -> Iterator[None]:
    """How a pass is compiled. They cost 50 µs, so that they are set only where something may be compiled.

    Args:
        device: of the model.
        dtype: of its weights; None if they are quantized, for which Inductor has not all products of its own.
        tag: of the weights.
    """
    on_cpu = device.type == "cpu"
    # torch gives its config modules `patch` only when they are imported, where a type checker does not see it.
    own_products = on_cpu and dtype in (torch.float32, torch.bfloat16, torch.float16)
    with ExitStack() as settings:
        settings.enter_context(torch.compiler.config.patch(cache_key_tag=tag or ""))  # type: ignore[attr-defined]
        # Two sizes that are equal in the first pass are still two, else it is compiled again when they part.
        settings.enter_context(sizes_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        # Numbers such as the attention's scale never change; taking them for variables costs a second tracing.
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
            # Else the weights are packed for oneDNN, only to be unpacked again, and torch does not keep such a graph.
            settings.enter_context(_without_onednn())
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


def _on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards are checked in every pass: those on the tensors that change, not the hundreds on the model."""
    return [
        guard.guard_type == "SHAPE_ENV" or (guard.guard_type == "TENSOR_MATCH" and not guard.name.startswith("model"))
        for guard in guards
    ]

"""Compiles a forward pass once for all its shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A pass through `torch.compile`, for any sizes; eager, with a warning, where that fails.

    On a CPU the weights are packed ("freezing"; they must not change afterwards) and everything is called from C++.
    In float32 the matrix products are compiled too: the libraries' need 25 µs for each call, which is longer than a
    small model's products take.

    Args:
        function: what to compile; every call must be with the same model.
        device: where it runs.
        dtype: what it computes in.
    """
    # Not shared between models, because nothing is left in the guards that tells one model from another.
    fast = torch.compile(  # type: ignore[call-overload]  # torch 2.13 forgets `isolate_recompiles` in its overloads
        function, dynamic=True, isolate_recompiles=True, options={"guard_filter_fn": _on_inputs}
    )
    on_cpu = device.type == "cpu"
    own_products = on_cpu and dtype == torch.float32
    native = torch._inductor.config.patch(
        freezing=on_cpu,
        cpp_wrapper=on_cpu,
        max_autotune=own_products,
        max_autotune_gemm_backends="CPP" if own_products else "ATEN",
    )
    works = True

    def run(*args: Any) -> Tensor:
        nonlocal works
        if works:
            try:
                with native:
                    return fast(*args)
            except torch._dynamo.exc.TorchDynamoException as error:
                works = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"compilation failed, decoding goes on uncompiled: {reason}", stacklevel=2)
        return function(*args)

    return run


def _on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards are checked in every pass: those on the tensors that change, not the hundreds on the model."""
    return [
        guard.guard_type == "SHAPE_ENV" or (guard.guard_type == "TENSOR_MATCH" and not guard.name.startswith("model"))
        for guard in guards
    ]

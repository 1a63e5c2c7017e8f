"""Compiles a forward pass once for all its shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """`function` through `torch.compile`, for any sizes; eager, with a warning, where that fails.

    On a CPU the weights are packed for the matrix kernels ("freezing"; they must not change
    afterwards) and the kernels are called from C++, which small models feel most. All models of a
    process share one budget of recompilations, by default eight, and the ninth model would run
    uncompiled without a word; so it is raised.
    """
    fast = torch.compile(function, dynamic=True)
    on_cpu = device.type == "cpu"
    native = torch._inductor.config.patch(freezing=on_cpu, cpp_wrapper=on_cpu)
    roomy = torch._dynamo.config.patch(recompile_limit=64)
    works = True

    def run(*args: Any) -> Tensor:
        nonlocal works
        if works:
            try:
                with native, roomy:
                    return fast(*args)
            except torch._dynamo.exc.TorchDynamoException as error:
                works = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"compilation failed, decoding goes on uncompiled: {reason}", stacklevel=2)
        return function(*args)

    return run

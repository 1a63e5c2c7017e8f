"""Devices: availability, and the dtypes that they compute fast in."""

from __future__ import annotations

import sys

import torch

from paradraft.models.runtime import AUTO, DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


def device_of(name: str) -> str:
    """The name of a device; "auto" is a GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == AUTO else name


def usable_device(name: str) -> torch.device:
    """The device of a name; raises ValueError if torch cannot use it."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        raise ValueError(f"device={name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return torch.device(name)


def computed_in(dtype: str, device: str) -> torch.dtype:
    """The dtype of activations and caches, see `Runtime.computed_in`; `dtype` is not "auto"."""
    if dtype in TORCH_DTYPES:
        return TORCH_DTYPES[dtype]
    return torch.bfloat16 if computes_bf16(torch.device(device_of(device))) else torch.float32


def fast_dtype(stored: torch.dtype | None, device: str) -> str:
    """The name of a checkpoint's dtype; float32 where the device computes that many times slower."""
    where = torch.device(device)
    is_slow = (stored == torch.float16 and where.type == "cpu") or (
        # Passes in C++ read bf16 in any case, and compute in float32 where the CPU has nothing better.
        stored == torch.bfloat16 and not computes_bf16(where) and not (where.type == "cpu" and sys.platform == "linux")
    )
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    return "float32" if is_slow or stored is None else names.get(stored, "float32")


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16; a CPU without them is many times slower in bf16 than in float32."""
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return True

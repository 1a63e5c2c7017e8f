"""Where and how models run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paradraft.models.quantization import check_quantization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
QUANTIZED = {"int8": 8, "int4": 4}
"""Names of weights that are rounded to so many bits; passes compute in `Runtime.computed_in`."""
PRECISIONS = (*DTYPES, *QUANTIZED)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how models run; the same for target and draft.

    Args:
        device: a torch device name.
        dtype: of the weights, one of `PRECISIONS`.
        compiled: compile the passes, also where that takes a minute or two: worth it for thousands of tokens. None
            compiles where it takes seconds, on CPUs in float32, bfloat16 and int8; False never.
        capacity: most tokens of a row, prompt included; None takes the model's own limit, at most
            4096.
        width: most tokens of one decoding pass.
        pad_to: least tokens of one decoding pass; passes in C++ need none.
        cuda_graphs: on a GPU, record compiled decoding passes and replay them.

    Raises:
        ValueError: an unknown dtype or device, or a dtype that cannot be had there.
    """

    device: str = "cpu"
    dtype: str = "float32"
    compiled: bool | None = None
    capacity: int | None = None
    width: int = 64
    pad_to: int = 1
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype={self.dtype!r}: use one of {', '.join(PRECISIONS)}")
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(f"device={self.device!r} cannot be used here: {str(error).splitlines()[0]}") from None
        if self.dtype in QUANTIZED:
            check_quantization(QUANTIZED[self.dtype], torch.device(self.device), self.computed_in)

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype of activations and caches; with quantized weights bf16, or float32 where that is faster."""
        if self.dtype not in QUANTIZED:
            return DTYPES[self.dtype]
        return torch.bfloat16 if computes_bf16(torch.device(self.device)) else torch.float32


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16; a CPU without them is many times slower in bf16 than in float32."""
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return True

"""Runtime settings of models: device, dtype, compilation.

Torch is imported only when a device is checked, so that options are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTIZED = {"int8": 8, "int4": 4}
"""Names and bits of quantized weights; passes compute in `Runtime.computed_in`."""
OF_FEW_BITS = "int8"
"""On CPUs, the dtype of a draft model in numbers whose target, or whose origin, is stored in few bits: in bfloat16 its
pass reads twice as much."""
STORED = "stored"
"""Quantized weights as the file has them; other models as with `AUTO`."""
PRECISIONS = (*DTYPES, *QUANTIZED, STORED)
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
AUTO = "auto"
WIDTH = 64
"""Default of `Runtime.width`."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Device, dtype and compilation of target and draft.

    Args:
        device: a torch device name; "auto" is a GPU if there is one.
        dtype: of the weights, one of `PRECISIONS` or `SHORT`; "auto" is that of the checkpoint, or float32 where the
            device computes that one slowly. Weights that are stored quantized stay as they are, and another dtype is an
            error.
        draft_dtype: the same for a draft model; None is `dtype`, or int8 on a CPU beside a target that is stored
            quantized. A draft that is stored quantized stays as it is.
        tokenizer: folder or Hugging Face id of the target's tokenizer; None for the target's own.
        compiled: compile the passes, also where that takes a minute or two: worth it for thousands of tokens. None
            compiles where it takes seconds, on CPUs in float32, bfloat16, int8 and int4; False never.
        capacity: most tokens of a row, prompt included; None for the context length of the model, or of its draft if
            that is smaller. Caches grow with the texts.
        width: most tokens of one decoding pass; an engine takes more if its drafts need them.
        pad_to: least tokens of one decoding pass; passes in C++ need no padding.
        cuda_graphs: on a GPU, record decoding passes and replay them.

    Raises:
        ValueError: an unknown dtype or device, or a dtype that the device does not support.
    """

    device: str = AUTO
    dtype: str = AUTO
    draft_dtype: str | None = None
    tokenizer: str | None = None
    compiled: bool | None = None
    capacity: int | None = None
    width: int = WIDTH
    pad_to: int = 1
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", precision_of(self.dtype))
        if self.draft_dtype is not None:
            object.__setattr__(self, "draft_dtype", precision_of(self.draft_dtype, "draft_dtype"))
        if self.device == AUTO:
            return
        from paradraft.models.devices import usable_device

        device = usable_device(self.device)
        if self.dtype in QUANTIZED:
            from paradraft.models.quantization import check_quantization

            check_quantization(QUANTIZED[self.dtype], device, self.computed_in)

    @property
    def computed_in(self) -> torch.dtype:
        """The dtype of activations and caches; for quantized weights bf16, or float32 where that is faster."""
        from paradraft.models.devices import computed_in

        return computed_in(self.dtype, self.device)


def precision_of(name: object, setting: str = "dtype") -> str:
    """The full name of a dtype, or "auto"; raises ValueError for an unknown name.

    >>> precision_of("bf16"), precision_of("int8"), precision_of("auto")
    ('bfloat16', 'int8', 'auto')
    """
    precision = SHORT.get(name, name) if isinstance(name, str) else name
    if precision not in (AUTO, *PRECISIONS):
        raise ValueError(f"{setting}={name!r}: use one of {', '.join((AUTO, *PRECISIONS, *SHORT))}")
    return str(precision)

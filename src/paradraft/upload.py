"""Numbers of the host as tensors of a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, device: torch.device | None) -> Tensor:
    """An int64 tensor of nested sequences of numbers. A GPU is not waited for, as `torch.tensor` does.

    >>> upload([[1, 2], [3, 4]], torch.device("cpu")).tolist()
    [[1, 2], [3, 4]]
    """
    if device is None or device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.long, device=device)
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)

"""The most memory that this process had while something ran.

It is all of the process's, with every model that is loaded: of two numbers of one run the difference
tells, not either alone. Linux keeps the peak of resident memory and begins anew when it is asked to,
which takes less than 0.1 ms. Elsewhere, or where it refuses, what is resident when somebody asks stands for it.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_FORGETS = Path("/proc/self/clear_refs")
_KNOWS = Path("/proc/self/status")


class PeakMemory:
    """The peaks from here on.

    Args:
        device: where the models are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_begun_anew = _begin_anew()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def rss_bytes(self) -> int:
        """Resident memory at its peak."""
        known = _peak_bytes() if self._has_begun_anew else None
        return int(psutil.Process().memory_info().rss) if known is None else known

    @property
    def gpu_bytes(self) -> int:
        """What tensors took of the GPU's memory at its peak; 0 if the models are on none."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


def _begin_anew() -> bool:
    """Lets the kernel forget the peak; whether it did."""
    try:
        _FORGETS.write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes() -> int | None:
    lines = _KNOWS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

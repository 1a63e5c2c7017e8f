"""What a benchmark or a training run ran on."""

from __future__ import annotations

import datetime
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch


def describe_machine(device: str) -> dict[str, Any]:
    """Hardware and versions, for the record beside every number."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("paradraft", "torch", "transformers")},
        "load_average": psutil.getloadavg()[0],
        # Of files elsewhere the name alone: a record is for readers on other machines.
        "command": [Path(part).name if Path(part).is_absolute() else part for part in sys.orig_argv],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""Hardware, library versions, and the main process of a distributed run."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def is_main_process() -> bool:
    """Whether this process prints for all of them: rank 0 under torchrun and accelerate."""
    return os.environ.get("RANK", "0") == "0"


def describe_machine(device: str) -> dict[str, Any]:
    """Hardware and versions, recorded with every measurement; of several GPUs the one that was used."""
    import torch  # here, so that `is_main_process` does not need it

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("paradraft", "torch", "transformers")},
        "git_revision": _git_revision(),
        "load_average": psutil.getloadavg()[0],
        "command": list(map(without_folder, sys.orig_argv)),
    }


def cpu_name() -> str:
    """Model name of this machine's CPU, as the operating system reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The revision of paradraft's sources, if they are a git checkout; + marks local changes."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def without_folder(argument: str) -> str:
    """A command-line argument for readers on other machines: absolute paths are cut to the file name.

    >>> without_folder("gsm8k=/home/me/test.jsonl"), without_folder("build/out.json")
    ('gsm8k=test.jsonl', 'build/out.json')
    """
    name, equals, file = argument.rpartition("=")
    return f"{name}{equals}{Path(file).name}" if Path(file).is_absolute() else argument

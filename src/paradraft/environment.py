"""What a program runs on and in: hardware, versions, and which of several processes speaks."""

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
    """Whether this process says what is the same in all: of those that torchrun and accelerate number, the first."""
    return os.environ.get("RANK", "0") == "0"


def describe_machine(device: str) -> dict[str, Any]:
    """Hardware and versions, for the record beside every number; of several GPUs the one that was used."""
    import torch  # here, so that commands learn without it which process speaks

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
    """What the system calls this machine's CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The revision of paradraft's sources, if they are a git checkout, with a + for changes."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def without_folder(argument: str) -> str:
    """An argument of a command for readers on other machines: of files elsewhere the name alone.

    >>> without_folder("gsm8k=/home/me/test.jsonl"), without_folder("build/out.json")
    ('gsm8k=test.jsonl', 'build/out.json')
    """
    name, equals, file = argument.rpartition("=")
    return f"{name}{equals}{Path(file).name}" if Path(file).is_absolute() else argument

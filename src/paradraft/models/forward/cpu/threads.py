"""How many threads a pass in C++ may use, and one thread for what torch computes between passes."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paradraft.models.forward.cpu.build import library

CGROUPS = Path("/sys/fs/cgroup")


def granted_threads() -> int:
    """As many threads as torch uses, but no more than this process has CPUs, by its affinity and by its quota."""
    return max(min(torch.get_num_threads(), len(os.sched_getaffinity(0)), math.ceil(min(cpu_quota(), sys.maxsize))), 1)


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs that the process may use at once according to its control groups; infinite without a limit.

    Args:
        cgroups: where the control groups are mounted.
        membership: the file with the groups of the process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    found = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        group = root / path.lstrip("/")
        # A group may use no more than any group that it is part of.
        found += [_quota_of(folder) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return min(found)


def _quota_of(folder: Path) -> float:
    """The limit of one group: `cpu.max` of version 2, `cpu.cfs_quota_us` of version 1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone; other threads of the process are not affected.

    What it computes between passes is little. OpenMP's threads would spin for milliseconds after each operation, on the
    CPUs that the threads of the next pass need.
    """
    before = use_one_torch_thread()
    try:
        yield
    finally:
        library().set_openmp_threads(before)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Inside, torch computes on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_torch_thread() -> int:
    """From now on, torch computes on the calling thread alone; returns how many threads it used until now."""
    torch.get_num_threads()  # asked for the first time in a thread, torch sets OpenMP's number itself
    return int(library().set_openmp_threads(1))

"""Thread counts: of passes in C++ by affinity and CPU quota, and one thread for torch between passes."""

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
    """The number of torch's threads, limited to the CPUs of this process by affinity and quota."""
    return max(min(torch.get_num_threads(), len(os.sched_getaffinity(0)), math.ceil(min(cpu_quota(), sys.maxsize))), 1)


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> float:
    """The CPU quota of the process's control groups (cgroups), in CPUs; infinite without a limit.

    Args:
        cgroups: their mount point.
        membership: the file with the groups of the process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        group = root / path.lstrip("/")
        # The quotas of all ancestors apply too.
        quotas += [_quota_of(folder) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return min(quotas)


def _quota_of(folder: Path) -> float:
    """The quota of one group: `cpu.max` in version 2, `cpu.cfs_quota_us` in version 1."""
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

    Because OpenMP's threads spin for milliseconds after each operation, they would take the CPUs of the next pass for
    the little that torch computes between passes.
    """
    before = use_one_torch_thread()
    try:
        yield
    finally:
        library().set_openmp_threads(before)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Inside, torch computes on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_torch_thread() -> int:
    """From now on, torch computes on the calling thread alone; returns the number of threads before."""
    torch.get_num_threads()  # the first call in a thread sets OpenMP's number of threads
    return int(library().set_openmp_threads(1))

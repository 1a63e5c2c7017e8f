"""Placement of target and drafter on CPUs and devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paradraft.errors import one_line, real_number

TIMEOUT_S = 120.0
"""Default timeout for an answer of a drafter in a separate process."""
MOST_TIMEOUT_S = 1e6
MOST_CPUS = 4096
"""CPU numbers are below this."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A pipeline stage: the device of some layers of a target.

    Args:
        cpus: numbers of the CPUs that compute the layers, if the device is the CPU; None for all.
    """

    device: str = "cpu"
    cpus: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.device if self.cpus is None else f"{self.device}:{in_words(set(self.cpus)).replace(',', '+')}"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """CPUs and devices of target and drafter.

    By default both share the CPUs of this process. With `draft_cpus` or `draft_device` the drafter has a separate
    process.

    Args:
        target_cpus: numbers of the CPUs that the target computes on; None for all CPUs of this process.
        target_stages: pipeline stages, if the target's layers are split over several devices. A drafter that drafts
            ahead then runs on the stages that the target does not use at that moment.
        tensor_parallel: each layer of the target is split over the processes that `torchrun` has started; each has the
            whole drafter.
        draft_cpus: numbers of the CPUs of the drafter's process; None for all.
        draft_device: a torch device for the drafter, such as cuda:1; None for the target's.
        draft_timeout_s: seconds after which a drafter that does not answer is given up.

    Raises:
        ValueError: this process does not have these CPUs, or the timeout is not above 0.
    """

    target_cpus: tuple[int, ...] | None = None
    target_stages: tuple[Stage, ...] | None = None
    tensor_parallel: bool = False
    draft_cpus: tuple[int, ...] | None = None
    draft_device: str | None = None
    draft_timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("target_cpus", "draft_cpus"):
            _check_cpus(name, getattr(self, name))
        for stage in self.target_stages or ():
            _check_cpus("target_stages", stage.cpus)
        if self.target_stages is not None and self.target_cpus is not None:
            raise ValueError("target_stages names the CPUs of each stage: leave out target_cpus")
        if not 0 < real_number("draft_timeout_s", self.draft_timeout_s) <= MOST_TIMEOUT_S:
            raise ValueError(f"draft_timeout_s={self.draft_timeout_s}: use seconds above 0, at most {MOST_TIMEOUT_S:g}")

    def check(self, gamma: object) -> None:
        """Raises ValueError if the drafter has a separate process but does not draft ahead (`gamma` is None)."""
        if self.has_process and gamma is None:
            name = "draft_device" if self.draft_cpus is None else "draft_cpus"
            raise ValueError(f"{name} gives the drafter a process of its own, to draft ahead: set gamma too")

    @property
    def has_process(self) -> bool:
        """Whether the drafter has a separate process."""
        return self.draft_cpus is not None or self.draft_device is not None


def usable_cpus() -> int:
    """Number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _check_cpus(name: str, cpus: object) -> None:
    if cpus is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"{name}: CPUs cannot be chosen on this system, leave it out")
    if not isinstance(cpus, tuple) or not cpus or not all(type(cpu) is int for cpu in cpus):
        raise ValueError(f"{name}={one_line(cpus)}: use the numbers of CPUs, such as (0, 1)")
    mine = os.sched_getaffinity(0)
    for cpu in cpus:
        if cpu not in mine:
            raise ValueError(f"{name}: there is no CPU {cpu} for this process, it has {in_words(mine)}")


def cpus_of(text: str | None) -> tuple[int, ...] | None:
    """Parses CPU numbers in the form of `taskset`: separated by commas or plus signs; a-b is a range.

    >>> cpus_of("0-2,5"), cpus_of("7+3")
    ((0, 1, 2, 5), (3, 7))
    """
    if text is None:
        return None
    cpus: set[int] = set()
    for part in text.replace("+", ",").split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_CPUS):
            raise ValueError(
                f"CPUs {text!r}: use numbers with commas between them, such as 0,2; 0-3 is all from 0 to 3"
            )
        cpus |= set(range(int(first), int(last) + 1))
    return tuple(sorted(cpus))


def in_words(cpus: set[int]) -> str:
    """Formats CPU numbers as `cpus_of` parses them.

    >>> in_words({0, 1, 2, 5})
    '0-2,5'
    """
    first = [cpu for cpu in sorted(cpus) if cpu - 1 not in cpus]
    last = [cpu for cpu in sorted(cpus) if cpu + 1 not in cpus]
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(first, last, strict=True))


def stages_of(text: str | None) -> tuple[Stage, ...] | None:
    """Parses devices separated by slashes; `cpu:` with CPU numbers, as in `cpus_of`, is a device too.

    >>> stages_of("cuda:0/cuda:1")
    (Stage(device='cuda:0', cpus=None), Stage(device='cuda:1', cpus=None))
    >>> [str(stage) for stage in stages_of("cpu:0-1,4/cpu:2/cpu")]
    ['cpu:0-1+4', 'cpu:2', 'cpu']
    """
    if text is None:
        return None
    stages = []
    for part in text.split("/"):
        device, _, cpus = part.strip().partition(":")
        if not device:
            raise ValueError(f"stages {text!r}: name devices with slashes between them, such as cuda:0/cuda:1")
        is_cpu = device == "cpu" and cpus
        stages.append(Stage(device=device, cpus=cpus_of(cpus)) if is_cpu else Stage(device=part.strip()))
    return tuple(stages)


@contextmanager
def on_cpus(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Pins this thread, and the threads and processes that it starts, to some CPUs; None changes nothing."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

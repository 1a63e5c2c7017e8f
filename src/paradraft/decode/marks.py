"""Marks in time: on the host, or in the work of a GPU, where one can be set without waiting for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Marks(Protocol):
    """Sets marks, and says how much time lies between two."""

    def mark(self) -> Any:
        """A mark behind everything that has been asked for so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time from one mark to a later one; waits until the later one is reached."""


class HostMarks:
    """On the host, which is where a CPU works."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The time between two marks."""
        return end - start


class GpuMarks:
    """In the work of a GPU: a mark is reached when it has done all that was asked for before.

    Args:
        device: which GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """A mark behind all that this GPU was asked for."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """The time between two marks; waits for the later one."""
        end.synchronize()
        return start.elapsed_time(end) / 1000.0


def marks_on(device: torch.device) -> Marks:
    """The marks for what a device does."""
    return GpuMarks(device) if device.type == "cuda" else HostMarks()

"""How long a GPU has nothing to do because the host has not yet seen that it is ready.

While kernels run it costs nothing that the host waits for them, and gaps between them are those of
launches. What a wait costs is its end: from the GPU's last work until the host goes on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch forgets to export it
from torch.autograd.profiler_util import FunctionEvent

Span = tuple[float, float]
"""Its start and its end, in microseconds."""
_WAITS = re.compile(r"^cuda(Device|Stream|Event)Synchronize$|^aten::_local_scalar_dense$")
"""Calls that return when the GPU is ready; the second is what `item` calls."""


def waited_s(events: Iterable[FunctionEvent]) -> float:
    """The seconds that the ends of all waits took.

    A copy to the host is a wait too, and is known by the copy on the GPU that has its number.

    Args:
        events: of a profiler that watched host and GPU.
    """
    found = list(events)
    works = [event for event in found if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    to_host = {event.id for event in works if event.name.startswith("Memcpy DtoH")}
    waits = [
        event
        for event in found
        if event.device_type == DeviceType.CPU
        and (_WAITS.search(event.name) or (event.name.startswith("cudaMemcpy") and event.id in to_host))
    ]
    return covered(ends_of([_span(wait) for wait in waits], [_span(work) for work in works])) / 1e6


def _span(event: FunctionEvent) -> Span:
    return event.time_range.start, event.time_range.end


def ends_of(waits: Sequence[Span], works: Sequence[Span]) -> list[Span]:
    """The part of each wait that lies behind all work that had begun; none if some goes on.

    Worked example: kernels run from 2 to 5 and from 6 to 7. A wait from 4 to 10 ends with 3 in which nothing runs; one
    from 12 to 14 finds the GPU ready, and is all for nothing.

    >>> ends_of([(4, 10), (12, 14)], [(2, 5), (6, 7)])
    [(7, 10), (12, 14)]
    """
    ends = []
    for start, end in waits:
        ready = max((work_end for work_start, work_end in works if work_start < end), default=-math.inf)
        if ready < end:
            ends.append((max(start, ready), end))
    return ends


def covered(spans: Sequence[Span]) -> float:
    """How much of the time lies in any of some spans: a wait may be part of another.

    >>> covered([(2, 6), (3, 4), (5, 7), (9, 10)])
    6.0
    """
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total

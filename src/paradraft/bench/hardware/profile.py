"""Splits the time of a round by kind of operation. For shares alone: a profiler slows down the run.

On a GPU the kernels are counted. The rest of the time is idle time of the GPU: until the host sees that it is
ready (only the end of a wait counts, from the GPU's last work until the host continues), and for Python and launches.
On a CPU the operations are counted, each without those it calls; a compiled pass is a single operation there, so its
products are not counted separately.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch does not export it
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from paradraft.bench.report.folding import FoldingTable, columns
from paradraft.decode.stats import RoundOutput
from paradraft.models.forward.cpu.model import PROFILED_AS

Span = tuple[float, float]
"""Start and end, in microseconds."""
_WAITS = re.compile(r"^cuda(Device|Stream|Event)Synchronize$|^aten::_local_scalar_dense$")
"""Calls that return when the GPU is ready; the second is what `item` calls."""


def waited_s(events: Iterable[FunctionEvent]) -> float:
    """Seconds that the ends of all waits took, from a profile of host and GPU.

    A copy to the host is a wait too; its id is that of the copy on the GPU.
    """
    recorded = list(events)
    works = [event for event in recorded if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    to_host = {event.id for event in works if event.name.startswith("Memcpy DtoH")}
    waits = [
        event
        for event in recorded
        if event.device_type == DeviceType.CPU
        and (_WAITS.search(event.name) or (event.name.startswith("cudaMemcpy") and event.id in to_host))
    ]
    return covered(ends_of([_span(wait) for wait in waits], [_span(work) for work in works])) / 1e6


def _span(event: FunctionEvent) -> Span:
    return event.time_range.start, event.time_range.end


def ends_of(waits: Sequence[Span], works: Sequence[Span]) -> list[Span]:
    """The part of each wait after all work that had begun; none if some work continues.

    Worked example: kernels run from 2 to 5 and from 6 to 7. A wait from 4 to 10 ends with 3 in which nothing runs;
    one from 12 to 14 finds the GPU ready, and counts in full.

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
    """Length of the union of spans: a wait may be part of another.

    >>> covered([(2, 6), (3, 4), (5, 7), (9, 10)])
    6.0
    """
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


KINDS = {
    "compiled": rf"CompiledFxGraph|^triton_|cpp_fused|^{PROFILED_AS}$",
    "attention": r"attention|flash|fmha|sdpa",
    "products": r"^aten::(mm|bmm|addmm|baddbmm|linear|matmul|_int_mm)$|mkl|gemm|gemv|cutlass|nvjet|splitk|onednn",
    "sampling": r"argmax|argmin|topk|sort|softmax|logsumexp|cumsum|multinomial|ArgMax|TopK",
}
"""Kinds of operations and kernels, by patterns of their names; the first match counts."""
REST = "other ops"
SYNC = "sync"
WAITING = "Python, launch"
_WRAPPERS = re.compile(r"Torch-Compiled Region|bytecode|TorchDynamo|AOTDispatcher|^Profiler|ProfilerStep")
"""The Python of torch.compile around a compiled pass."""
ROUNDS, SKIPPED = 12, 2


def kind_of(name: str) -> str:
    """The kind of an operation or a kernel.

    >>> [kind_of(name) for name in ("aten::mm", "aten::argmax", "triton_poi_fused_add_0", "aten::copy_")]
    ['products', 'sampling', 'compiled', 'other ops']
    """
    if _WRAPPERS.search(name):
        return WAITING
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


def profile(steps: Iterator[RoundOutput], device: torch.device) -> dict[str, Any] | None:
    """Profiles some rounds of an answer, after the first ones.

    Args:
        steps: the rounds of an answer that has not begun.

    Returns:
        `rounds` that were profiled, `round_ms` of each under the profiler, and `shares` of its time; None where the
        answer is too short.
    """
    on_gpu = device.type == "cuda"
    _, skipped, _ = _watched(steps, SKIPPED, on_gpu)  # a process's first profiler slows down what it sees first
    if skipped < SKIPPED:
        return None
    profiler, rounds, total_s = _watched(steps, ROUNDS, on_gpu)
    if not rounds:
        return None
    times_s = dict.fromkeys((*KINDS, REST), 0.0)
    for event in profiler.key_averages():
        is_on_gpu = event.device_type == DeviceType.CUDA
        is_label = is_on_gpu and event.is_user_annotation  # it spans the kernels that it names
        kind = kind_of(event.key)
        if kind != WAITING and is_on_gpu == on_gpu and not is_label:
            times_s[kind] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
    times_s[SYNC] = waited_s(profiler.events()) if on_gpu else 0.0
    shares = {kind: seconds / total_s for kind, seconds in times_s.items()}
    return {
        "rounds": rounds,
        "round_ms": total_s / rounds * 1e3,
        "shares": shares | {WAITING: max(1.0 - sum(shares.values()), 0.0)},
    }


def _watched(steps: Iterator[RoundOutput], most: int, on_gpu: bool) -> tuple[torch.profiler.profile, int, float]:
    """Runs at most `most` steps under a profiler; returns it, the steps that there were, and their seconds."""
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu)
    with _silenced_stderr():
        profiler.start()
    began_s = time.perf_counter()
    rounds = sum(1 for _ in zip(range(most), steps, strict=False))
    total_s = time.perf_counter() - began_s
    with _silenced_stderr():
        profiler.stop()
    return profiler, rounds, total_s


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Silences standard error, where the profiler's library writes whatever its log level is."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def profile_table(profiles: dict[str, dict[str, Any] | None], title: str, names: Mapping[str, str]) -> FoldingTable:
    """One line per method: the shares of a round's time."""
    kinds = [*KINDS, REST, SYNC, WAITING]
    caption = (
        "shares of a round under the profiler, which slows it down; compiled: passes in C++ or through torch.compile"
    )
    table = FoldingTable(title, columns("method", "ms", *kinds), legend=[caption])
    for spec, figures in profiles.items():
        if figures is None:
            table.add_row(names[spec], "-", *["-"] * len(kinds))
        else:
            shares = [f"{figures['shares'][kind]:.0%}" for kind in kinds]
            table.add_row(names[spec], f"{figures['round_ms']:.1f}", *shares)
    return table

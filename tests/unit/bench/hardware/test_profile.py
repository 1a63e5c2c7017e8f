"""A profile of a GPU, from events as torch's profiler records them there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from paradraft.bench.hardware import profile as module
from paradraft.bench.hardware.profile import waited_s


def event(name: str, start_us: float, end_us: float, *, number: int = 0, gpu: bool = False) -> FunctionEvent:
    return FunctionEvent(
        id=number, name=name, thread=1, start_us=start_us, end_us=end_us, stack=[], use_device="cuda",
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU, is_user_annotation=name.startswith("##"),
    )  # fmt: skip


def a_round() -> EventList:
    """In microseconds: two kernels with a gap, for which the host waits 20 longer than they take; a copy to the host,
    which it sees 30 later, and a synchronization that finds nothing to wait for; a copy from the host."""
    compiled = "## Call CompiledFxGraph x ##"
    events = EventList(
        [
            event(compiled, 0, 50),
            event("cudaLaunchKernel", 10, 15, number=7),
            event(compiled, 100, 510, gpu=True),
            event("triton_poi_fused_add_0", 100, 300, number=7, gpu=True),
            event("nvjet_tst_128x8", 320, 500, number=8, gpu=True),
            event("cudaDeviceSynchronize", 120, 520),
            event("aten::copy_", 600, 700),
            event("cudaMemcpyAsync", 610, 680, number=9),
            event("Memcpy DtoH (Device -> Pageable)", 640, 650, number=9, gpu=True),
            event("cudaStreamSynchronize", 685, 695, number=10),
            event("cudaMemcpyAsync", 800, 900, number=11),
            event("Memcpy HtoD (Pageable -> Device)", 850, 860, number=11, gpu=True),
        ],
        use_device="cuda",
    )
    events._build_tree()
    return events


def test_what_a_wait_costs_is_its_end() -> None:
    """Guards against kernels' own time counted twice, gaps between them, copies to the host left out or those from it
    counted in, and a wait inside another."""
    assert waited_s(a_round()) == pytest.approx((20 + 30 + 10) / 1e6)
    assert waited_s([event("aten::_local_scalar_dense", 0, 30), event("cudaStreamSynchronize", 5, 25)]) == 30 / 1e6
    assert waited_s([event("aten::add", 0, 30), event("sum", 0, 9, gpu=True)]) == 0


def test_shares_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against shares that are no parts of a whole: a label around compiled kernels spans them once more, and
    would leave nothing for the rest."""
    profiler = Mock(events=a_round, key_averages=a_round().key_averages)

    def watched(steps: Iterator[Any], most: int, on_gpu: bool) -> tuple[Mock, int, float]:
        assert on_gpu
        return profiler, most, 1e-3

    monkeypatch.setattr(module, "_watched", watched)
    found = module.profile(iter(()), torch.device("cuda"))
    assert found is not None
    expected = {"compiled": 0.2, "products": 0.18, "other ops": 0.02, "sync": 0.06, "Python, launch": 0.54}
    assert found["shares"] == pytest.approx({"attention": 0, "sampling": 0} | expected)

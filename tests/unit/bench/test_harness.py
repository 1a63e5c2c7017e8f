from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paradraft.bench.answer import Answer
from paradraft.bench.harness import Measured, measure
from paradraft.bench.methods import Method
from paradraft.core import GREEDY, Sampling


def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> Answer:
    return Answer(tokens=[[1] * max_new_tokens for _ in prompts], total_s=1.0, stats=None)


def measured(*answerers: Callable[..., Answer], device: str = "cpu") -> list[Measured]:
    methods = [Method.parse(f"ngram:k={k}") for k, _ in enumerate(answerers, start=1)]
    return measure(
        dict(zip(methods, answerers, strict=True)), ["a", "b"], max_new_tokens=4, sampling=GREEDY, runs=2,
        device=torch.device(device), report=lambda news: None,
    )  # fmt: skip


def test_the_memory_is_that_of_the_gpu_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--device cuda:1` against the peaks of GPU 0, where nothing runs."""
    used = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: int(device == used))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: reset.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 7 if device == used else 0)
    reset: list[torch.device | None] = []
    assert [one.peak_gpu_bytes for one in measured(answer, answer, device="cuda:1")] == [7, 7]
    assert set(reset) == {used}
    assert [one.peak_gpu_bytes for one in measured(answer)] == [None]

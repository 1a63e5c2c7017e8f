from __future__ import annotations

import pytest
import torch

from paradraft.core import Step
from paradraft.decode import stats as module
from paradraft.decode.stats import Clock


def step(tokens: list[list[int]], accepted: list[int], drafted: list[int]) -> Step:
    rows = list(range(len(tokens)))
    return Step(
        rows=rows, tokens=tokens, accepted=accepted, drafted=drafted, nodes=drafted, finished=[False] * len(tokens)
    )


def test_acceptance_length_is_emitted_tokens_per_round() -> None:
    """Guards against the bonus token counted twice or not at all, and against cut tokens in the count."""
    clock = Clock()
    clock.count(step([[1, 2, 3, 4, 5]], [4], [4]))  # all accepted, and the bonus
    clock.count(step([[1]], [0], [4]))  # all rejected, one recovered
    clock.count(step([[1, 2]], [2], [4]))  # cut inside the accepted run: no token of the target's own
    assert clock.stats.tokens == 8
    assert clock.stats.rounds == 3
    assert clock.stats.acceptance_length == 8 / 3
    assert clock.stats.drafted == (3, 3, 3, 3)
    assert clock.stats.accepted == (2, 2, 1, 1)
    assert clock.stats.acceptance_per_position == (2 / 3, 2 / 3, 1 / 3, 1 / 3)


def test_drafts_of_different_lengths() -> None:
    """Guards against a rate above 1 or a wrong divisor where short drafts never reach a position."""
    clock = Clock()
    clock.count(step([[1], [1, 2, 3]], [0, 2], [0, 3]))
    clock.count(step([[1, 2], [1]], [1, 0], [1, 0]))
    assert clock.stats.drafted == (2, 1, 1)
    assert clock.stats.acceptance_per_position == (1.0, 1.0, 0.0)


def test_plain_decoding_and_nothing_at_all() -> None:
    """Guards against a division by zero without drafts, and without rounds."""
    clock = Clock()
    assert clock.stats.acceptance_length == 0.0
    clock.count(step([[1]], [0], [0]))
    assert clock.stats.acceptance_length == 1.0
    assert clock.stats.acceptance_per_position == ()


def test_every_second_is_booked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against time left out (the first draft, prefill) or the reader's own time counted in."""
    now_s = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s[0])
    waits = []
    clock = Clock(lambda: waits.append(now_s[0]))
    for name, seconds in [("prefill", 1.0), ("draft", 2.0), ("verify", 4.0), ("other", 8.0)]:
        now_s[0] += seconds
        clock.lap(name)
    now_s[0] += 1000.0
    clock.skip()
    now_s[0] += 16.0
    clock.lap("draft")
    stats = clock.stats
    assert (stats.prefill_s, stats.draft_s, stats.verify_s, stats.other_s) == (1.0, 18.0, 4.0, 8.0)
    assert stats.total_s == 31.0
    assert len(waits) == 5, "a GPU must have finished before the clock is read"


def test_a_clock_waits_for_the_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--device cuda:1` against times that end when GPU 0, which has nothing to do, is ready."""
    waits: list[torch.device | None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(device))
    Clock.on(torch.device("cuda:1")).lap("draft")
    assert waits == [torch.device("cuda:1")]
    Clock.on(torch.device("cpu")).lap("draft")
    assert len(waits) == 1

from __future__ import annotations

import pytest
import torch

from paradraft.decode import stats as stats_module
from paradraft.decode.stats import Clock, RoundOutput


def step(tokens: list[list[int]], accepted: list[int], drafted: list[int]) -> RoundOutput:
    return RoundOutput(
        requests=list(range(len(tokens))), tokens=tokens, accepted=accepted, drafted=drafted, nodes=drafted,
        paths=[list(range(kept)) for kept in accepted], finished=[False] * len(tokens),
    )  # fmt: skip


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


class Gpu:
    """Marks that are reached later than they are set: work waits for what was asked for before."""

    def __init__(self) -> None:
        self.now_s = self.ready_s = 100.0
        self.waits = 0

    def work(self, *, host_s: float, gpu_s: float) -> None:
        """The host asks for some work, which the GPU begins as soon as it can."""
        self.now_s += host_s
        self.ready_s = max(self.ready_s, self.now_s) + gpu_s

    def mark(self) -> float:
        return max(self.ready_s, self.now_s)

    def seconds(self, start: float, end: float) -> float:
        self.waits += end > self.now_s
        self.now_s = max(self.now_s, end)
        return end - start


def test_every_second_is_booked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against time left out (the first draft, prefill) or the reader's own time counted in."""
    now_s = [100.0]
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: now_s[0])
    clock = Clock()
    for name, seconds in [("prefill", 1.0), ("draft", 2.0), ("verify", 4.0), ("other", 8.0)]:
        now_s[0] += seconds
        clock.lap(name)
    assert clock.last_s["draft"] == 2.0 and clock.last_s["verify"] == 4.0
    now_s[0] += 1000.0
    clock.skip()
    now_s[0] += 16.0
    clock.lap("draft")
    stats = clock.stats
    assert (stats.prefill_s, stats.draft_s, stats.verify_s, stats.other_s) == (1.0, 18.0, 4.0, 8.0)
    assert stats.total_s == 31.0


def test_laps_of_one_name_are_added_until_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a policy learns of the time between two passes, which may be booked in parts."""
    now_s = [0.0]
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: now_s[0])
    clock = Clock()
    for name, seconds in [("other", 1.0), ("other", 2.0), ("verify", 4.0), ("other", 8.0), ("verify", 16.0)]:
        now_s[0] += seconds
        clock.lap(name)
        if name == "verify":
            assert clock.last_s["other"] == (3.0 if now_s[0] < 8.0 else 8.0)
    assert clock.stats.other_s == 11.0


def test_a_gpu_is_waited_for_once_a_round() -> None:
    """Guards the target's pass, which is asked for while the drafter's still runs, and the times of both."""
    gpu = Gpu()
    clock = Clock(gpu)
    gpu.work(host_s=1.0, gpu_s=9.0)
    clock.lap("prefill")
    assert (gpu.waits, gpu.now_s) == (1, 110.0)
    for _ in range(3):
        gpu.work(host_s=2.0, gpu_s=5.0)
        clock.lap("draft")
        gpu.work(host_s=1.0, gpu_s=10.0)  # asked for while the draft is made
        clock.lap("verify")
        gpu.work(host_s=0.5, gpu_s=0.25)
        clock.lap("other")
    assert gpu.waits == 1 + 3
    assert (clock.last_s["draft"], clock.last_s["verify"]) == (7.0 - 0.25, 10.0)
    assert clock.stats.other_s == 3 * 0.75
    assert clock.stats.total_s == gpu.ready_s - 100.0


def test_a_clock_is_that_of_the_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--device cuda:1` against marks in the work of GPU 0, which has nothing to do."""
    recorded: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    Clock.on(torch.device("cuda:1")).lap("draft")
    assert recorded == [torch.device("cuda:1")] * 2
    Clock.on(torch.device("cpu")).lap("draft")
    assert len(recorded) == 2


def test_a_request_is_told_its_own_rounds_and_the_times_since_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests that join later: what was before is not theirs, and what others do while they run is time."""
    now_s = [100.0]
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: now_s[0])
    clock = Clock()

    def lap(name: str, seconds: float) -> None:
        now_s[0] += seconds
        clock.lap(name)

    clock.join([0])
    lap("prefill", 1.0)
    lap("draft", 2.0)
    clock.count(step([[1, 2]], [1], [3]))
    lap("other", 8.0)  # of a round before the next request, though it is booked later
    clock.join([1])
    lap("prefill", 16.0)
    lap("verify", 32.0)
    clock.count(step([[3], [4, 5, 6]], [0, 2], [0, 2]))
    first, second = clock.stats_of(0), clock.stats_of(1)
    assert (first.tokens, first.rounds, first.nodes, first.drafted, first.accepted) == (3, 2, 3, (1, 1, 1), (1, 0, 0))
    assert (first.prefill_s, first.draft_s, first.verify_s, first.other_s) == (17.0, 2.0, 32.0, 8.0)
    assert (second.tokens, second.rounds, second.nodes, second.drafted, second.accepted) == (3, 1, 2, (1, 1), (1, 1))
    assert (second.prefill_s, second.draft_s, second.verify_s, second.other_s) == (16.0, 0.0, 32.0, 0.0)


def test_a_request_that_joins_again_began_when_it_first_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of an answer that was taken up again."""
    now_s = [100.0]
    monkeypatch.setattr(stats_module.time, "perf_counter", lambda: now_s[0])
    clock = Clock()
    clock.join([0])
    now_s[0] += 1.0
    clock.lap("prefill")
    clock.join([0])
    now_s[0] += 2.0
    clock.lap("prefill")
    assert clock.stats_of(0).prefill_s == 3.0


def test_what_has_ended_is_in_the_sum_alone() -> None:
    """Guards the memory of a service that answers for days, and the sum over all requests."""
    clock = Clock()
    for request in range(3):
        clock.join([request])
        clock.count(
            RoundOutput(
                requests=[request], tokens=[[1, 2]], accepted=[1], drafted=[4], nodes=[5], paths=[[0]], finished=[True]
            )
        )
        ended = clock.end(request)
        assert (ended.tokens, ended.rounds, ended.nodes, ended.accepted) == (2, 1, 5, (1, 0, 0, 0))
    stats = clock.stats
    assert (stats.tokens, stats.rounds, stats.nodes) == (6, 3, 15)
    assert (stats.drafted, stats.accepted) == ((3, 3, 3, 3), (3, 0, 0, 0))
    assert not clock._counts and not clock._before

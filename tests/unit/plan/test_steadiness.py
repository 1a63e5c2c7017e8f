"""What `paradraft plan` says of a machine that was not equally fast all the time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from paradraft.bench.steadiness import UNSTEADY
from paradraft.decode.batch import Batch
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.plan import steadiness
from paradraft.plan.steadiness import Watch, unsteady_plan
from paradraft.sampling_params import GREEDY
from paradraft.sources.target_loading import load_target


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rounds take as long as `round_s` says, the first of an answer ten times as long."""
    now = SimpleNamespace(s=0.0, round_s=0.002, rounds=0)
    monkeypatch.setattr(steadiness, "time", SimpleNamespace(perf_counter=lambda: now.s))
    step, join = Batch.step, Batch.join

    def timed_step(self: Batch) -> object:
        now.s += now.round_s * (1 if now.rounds else 10)
        now.rounds += 1
        return step(self)

    def timed_join(self: Batch, *given: object) -> None:
        now.rounds = 0
        join(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "step", timed_step)
    monkeypatch.setattr(Batch, "join", timed_join)
    return now


def watch_on(family: Path) -> Watch:
    target = load_target(str(family / "target"), Runtime(dtype="float64", capacity=100))
    return Watch(Engine(target, NoDrafter(), Speculation()), "abcabc", GREEDY)


def test_a_plain_speed_that_moved_is_told(family: Path, machine: SimpleNamespace) -> None:
    """Guards plans of a busy machine: the same rounds took longer at the end than at the beginning."""
    watch = watch_on(family)
    watch.look()
    machine.round_s = 0.003
    watch.look()
    found = watch.as_json()
    assert found["plain_round_ms"] == pytest.approx([2.0, 3.0]) and found["spread"] == pytest.approx(0.5)
    line = "unsteady machine: plain rounds took 2.00 to 3.00 ms (50 %); run it again when it is idle"
    assert unsteady_plan({"steadiness": found}) == line


def test_a_small_move_is_not(family: Path, machine: SimpleNamespace) -> None:
    """Guards against a warning on every machine; and every look has as many rounds as the first."""
    watch = watch_on(family)
    for speed in (1.0, 1 + UNSTEADY - 0.01, 1.05):
        machine.round_s = 0.002 * speed
        watch.look()
        assert machine.rounds == watch._rounds
    assert unsteady_plan({"steadiness": watch.as_json()}) is None

"""Costs and predictions in a world in which every pass takes a time that is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paradraft.bench.run import run_benchmark
from paradraft.bench.setup import Workload
from paradraft.bench.spec import Benchmark, Method
from paradraft.core import Draft, Drafting, TargetOut
from paradraft.decode import stats
from paradraft.drafters.none import NoDrafter
from paradraft.drafters.pard import PardDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.plan import costs as costs_module
from paradraft.plan.acceptance import Acceptance
from paradraft.plan.costs import Rotation, measure_rounds
from paradraft.plan.plan import run_plan
from paradraft.plan.predict import Way
from paradraft.plan.task import PlanTask, doubts, known_of
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from tests.support.decoding import requests

EXACT = Runtime(dtype="float64", capacity=100)
PROMPTS = ["abcabc", "xyzzy", "aaaaaaaaaaaa", "qwertyqwe"]


def target_s(batch: int, width: int) -> float:
    return 8.0 + 0.5 * batch * width


def draft_s(batch: int, k: int) -> float:
    return 3.0 + 0.25 * batch * k


@pytest.fixture
def _known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take the times above, prefill 100 and the drafter's own 40; nothing else takes any."""
    now = SimpleNamespace(s=0.0, has_read=False)
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: now.s))
    forward, read, propose, start = Target.forward, Target.read, PardDrafter.propose, PardDrafter.start

    def timed_forward(self: Target, draft: Draft) -> TargetOut:
        now.s += target_s(len(draft.tokens), draft.tokens.shape[1] + 1)
        return forward(self, draft)

    def timed_read(self: Target, counts: Sequence[int]) -> None:
        now.s += 100.0
        read(self, counts)

    def timed_start(self: PardDrafter, drafting: Drafting, device: torch.device) -> None:
        now.has_read = False
        start(self, drafting, device)

    def timed_propose(self: PardDrafter, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        if k := max(lengths):
            now.s += draft_s(len(lengths), k) + (0.0 if now.has_read else 40.0)
            now.has_read = True
        return propose(self, lengths, after)

    monkeypatch.setattr(Target, "forward", timed_forward)
    monkeypatch.setattr(Target, "read", timed_read)
    monkeypatch.setattr(PardDrafter, "start", timed_start)
    monkeypatch.setattr(PardDrafter, "propose", timed_propose)


def test_every_length_has_its_turn_and_the_first_round_of_each_is_not_counted() -> None:
    """Guards against lengths that are never measured because short answers end before their turn."""
    rotation = Rotation((1, 3))
    asked = []
    for _ in range(4):
        rotation.start(None, is_ragged=True)
        rotation.join(requests([[1]]))
        for _ in range(2):  # answers of two rounds
            asked.append((rotation.next()[0], rotation.is_counted))
            if rotation.is_counted:
                rotation.count()
    assert asked == [(1, False), (1, True), (1, False), (1, True), (3, False), (3, True), (3, False), (3, True)]


@pytest.mark.usefixtures("_known_times")
def test_rounds_are_booked_under_their_length(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards costs of one length, part or batch size under another's name, and prefill in the time of a round."""
    monkeypatch.setattr(costs_module, "VISITS", 1)
    monkeypatch.setattr(costs_module, "LEAST_S", 0.0)
    engine = load(str(family / "target"), drafter="pard", draft=str(family / "pard"), k=5, runtime=EXACT)
    engines = {"plain": (Engine(engine.target, NoDrafter(), Speculation(k=1)), (0,)), "chains": (engine, (1, 2, 5))}
    for batch in (1, 3):
        costs = measure_rounds(
            engines, PROMPTS, batch=batch, max_new_tokens=12, sampling=Sampling(), report=lambda text: None
        )
        assert costs["plain"].prefill_s == costs["chains"].prefill_s == 100.0
        assert costs["plain"].rounds[0].verify_s == pytest.approx(target_s(batch, 1))
        assert costs["plain"].rounds[0].total_s == costs["plain"].rounds[0].verify_s
        for k in (1, 2, 5):
            assert costs["chains"].rounds[k].draft_s == pytest.approx(draft_s(batch, k))
            assert costs["chains"].rounds[k].verify_s == pytest.approx(target_s(batch, k + 1))
        assert costs["chains"].draft_prefill_s == pytest.approx(40.0)


@pytest.mark.usefixtures("_known_times")
def test_fast_models_are_timed_for_longer(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards predictions against one slow moment; and against giving up, meanwhile, though enough is known: after the
    second prompt there is no room."""
    monkeypatch.setattr(costs_module, "VISITS", 1)
    monkeypatch.setattr(costs_module, "FUTILE", 2)
    runtime = Runtime(dtype="float64", capacity=14)
    engine = load(str(family / "target"), drafter="pard", draft=str(family / "pard"), k=1, runtime=runtime)
    prompts = [PROMPTS[0], *[PROMPTS[2]] * 3]
    for least_s, turns in ((0.0, 2), (9.0, 10)):
        seconds, said = itertools.count(), list[str]()
        monkeypatch.setattr(costs_module, "LEAST_S", least_s)
        monkeypatch.setattr(costs_module, "time", SimpleNamespace(monotonic=lambda clock=seconds: next(clock)))
        measure_rounds(
            {"chains": (engine, (1,))}, prompts, batch=1, max_new_tokens=2, sampling=Sampling(), report=said.append
        )
        assert said[-1] == f"batch 1: timing rounds, answer {turns}"


def task(family: Path, **given: Any) -> PlanTask:
    asked = {
        "target": str(family / "target"), "speculation": Speculation(drafter="pard", draft=str(family / "pard")),
        "batches": (1, 2, 4), "ks": (1, 2, 4), "trees": (6,), "prompts": PROMPTS, "max_new_tokens": 24,
        "sampling": Sampling(),
    }  # fmt: skip
    return PlanTask(**(asked | given))


@pytest.mark.usefixtures("_known_times")
def test_predictions_are_what_decoding_takes(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the whole of it, rows that end early and prefill too: where costs are known, so is the speed."""
    monkeypatch.setattr(costs_module, "VISITS", 1)
    monkeypatch.setattr(costs_module, "LEAST_S", 0.0)
    asked = task(family, batches=(1, 4), ks=(2, 4), max_new_tokens=20)
    plan = run_plan(asked, EXACT, known=None, source=None, check_runs=0, report=lambda text: None)
    found = {(one["batch"], one["way"]): one for one in plan["predictions"]}
    assert set(found) == {(batch, way) for batch in (1, 4) for way in ("plain", "k=2", "k=4", "k=4:tree=6")}
    for batch, name in plan["chosen"].items():
        assert found[batch, name]["speedup"] == max(one["speedup"] for (size, _), one in found.items() if size == batch)
    drafting = load(asked.target, drafter="pard", draft=asked.speculation.draft, k=4, runtime=EXACT)
    for (batch, way), engine in (
        ((1, "k=2"), Engine(drafting.target, drafting.drafter, Speculation(k=2))),
        ((4, "plain"), Engine(drafting.target, NoDrafter(), Speculation(k=1))),
        ((4, "k=4"), drafting),
        ((4, "k=4:tree=6"), Engine(drafting.target, drafting.drafter, Speculation(k=4, tree=Tree(budget=6)))),
    ):
        total_s = 0.0
        for start in range(0, len(PROMPTS), batch):
            engine.generate(
                PROMPTS[start : start + batch], max_new_tokens=asked.max_new_tokens, sampling=asked.sampling
            )
            total_s += engine.clock.stats.total_s
        # The last drafts of an answer are cut, which a prediction does not know of; these answers are short.
        assert found[batch, way]["total_s"] == pytest.approx(total_s, rel=0.05), (batch, way)


def test_what_a_benchmark_wrote_is_what_the_plan_would_measure(family: Path) -> None:
    """Guards the way through a report: the same passes, for a chain that it has and one that it has not."""
    draft = str(family / "pard")
    specs = ["pard:k=4:batch=4", "pard:k=2:batch=4", "pard:k=4:tree=6:batch=4"]
    methods = [Method.parse(spec, Speculation(draft=draft), dtype="float64") for spec in specs]
    asked = task(family, ks=None, trees=None, max_new_tokens=12)
    benchmark = Benchmark(target=asked.target, methods=methods, sampling=asked.sampling, runtime=EXACT, runs=1)
    (report,) = run_benchmark(benchmark, [Workload.of(PROMPTS, asked.max_new_tokens)], lambda text: None)
    known = known_of(asked, report, "bench.json", "float64")
    assert {way: one.spec for way, one in known.items()} == {
        Way(k=1): specs[1], Way(k=2): specs[1], Way(k=3): specs[0], Way(k=4): specs[0], Way(k=4, tree=6): specs[2],
    }  # fmt: skip
    engine = load(asked.target, drafter="pard", draft=draft, k=4, runtime=EXACT)
    answers = engine.generate(PROMPTS, max_new_tokens=asked.max_new_tokens, sampling=asked.sampling)
    assert known[Way(k=4)].passes(4) == tuple(answer.stats.rounds for answer in answers)
    with pytest.raises(ValueError, match=r"k=5: bench\.json knows chains of 'pard' up to 4 tokens only"):
        known_of(task(family, ks=(2, 5)), report, "bench.json", "float64")
    with pytest.raises(ValueError, match=r"tree budget 9: .*measure pard:tree=9"):
        known_of(task(family, trees=(9,)), report, "bench.json", "float64")
    with pytest.raises(ValueError, match="has 4 answers, but there are 3 prompts"):
        known_of(task(family, prompts=PROMPTS[:3], batches=(1, 3)), report, "bench.json", "float64")


def test_a_part_of_a_batch_does_not_pass_for_a_batch(family: Path) -> None:
    """Guards against the speed of four rows under the name of a batch of sixteen, and of texts that mean nothing."""
    with pytest.raises(ValueError, match="4 prompts cannot be dealt out in batches of 16"):
        task(family, batches=(1, 4, 16))
    with pytest.raises(ValueError, match="random weights"):
        task(family, target="shape:tiny-target")


def test_what_a_report_is_about_and_the_plan_is_not_is_said(family: Path) -> None:
    """Guards against a plan that looks measured, from drawn verdicts, another draft, target or other prompts."""
    asked = task(family)
    seen = Acceptance(
        spec="pard:k=2",
        k=2,
        tree=None,
        length=2.0,
        shares=(0.5, 0.5),
        answers=(2,),
        by_round=None,
        draft=asked.speculation.draft,
    )
    report = {"arguments": {"target": asked.target}, "example": {"prompt": PROMPTS[0]}}
    assert doubts(asked, {Way(k=2): seen}, report, "x.json") == []
    other = replace(seen, draft="elsewhere", is_synthetic=True)
    report = {"arguments": {"target": "t"}, "example": {"prompt": "another"}}
    found = doubts(asked, {Way(k=1): other, Way(k=2): other}, report, "x.json")
    words = ("target t", "draft elsewhere", "other prompts", "synthetic")
    assert all(word in doubt for word, doubt in zip(words, found, strict=True))


def test_there_must_be_room_for_the_drafts(family: Path) -> None:
    """Guards against waiting for ever for a round that never comes."""
    runtime = Runtime(dtype="float64", capacity=14)
    engine = load(str(family / "target"), drafter="pard", draft=str(family / "pard"), k=5, runtime=runtime)
    with pytest.raises(ValueError, match="room for 2 tokens, too few to draft 5"):
        measure_rounds(
            {"chains": (engine, (5,))}, [PROMPTS[2]], batch=1, max_new_tokens=2, sampling=Sampling(),
            report=lambda text: None,
        )  # fmt: skip

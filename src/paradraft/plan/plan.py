"""`paradraft plan`: the best K (or tree) for each batch size, predicted from measured costs and known acceptance."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from paradraft.bench.harness import measure, summarize
from paradraft.bench.result import tokens_by_round
from paradraft.core import Drafter
from paradraft.drafters import load_drafter
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import check_memory, resolve
from paradraft.environment import describe_machine
from paradraft.export.engines import tensorrt_config, vllm_config
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.plan.acceptance import Acceptance
from paradraft.plan.costs import Costs, measure_rounds
from paradraft.plan.predict import PLAIN, Prediction, Way, best, predict
from paradraft.plan.steadiness import Watch
from paradraft.plan.task import PlanTask, ways_of
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.target_loading import load_planned

Report = Callable[[str], None]
Checked = dict[tuple[int, Way], dict[str, Any]]
"""Measured figures by batch size and way."""
DRAFT = "DRAFT"
"""Placeholder for the pocket family's draft model in the configurations of engines."""


def run_plan(
    task: PlanTask,
    runtime: Runtime,
    *,
    known: dict[Way, Acceptance] | None,
    source: str | None,
    check_runs: int,
    report: Report,
) -> dict[str, Any]:
    """Measures costs, predicts, chooses, and optionally checks the predictions.

    Args:
        known: acceptance by way, from `known_of`; None measures it.
        source: name of the report that it is from, for the record.
        check_runs: runs of the benchmark that checks the predictions; 0 for none.

    Returns:
        JSON values: `machine`, `arguments`, `acceptance`, `costs_ms`, `predictions`, `chosen`, `chains` (K by batch
        size), the configurations of `vllm` and `tensorrt_llm`, and `steadiness` of the machine.

    Raises:
        ValueError: a model cannot be loaded, or the prompts do not fit into it.
    """
    speculation = task.speculation
    plan = resolve(Checkpoint.find(task.target), [task.speculate(way) for way in known or ways_of(task)], runtime)
    check_memory(plan)
    report(f"loading {task.target}")
    target = load_planned(plan)
    report(f"loading drafter {speculation.drafter}")
    drafter = load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=plan.runtime)
    plain = _engine(task, PLAIN, target, drafter)
    plain.check(task.prompts, max_new_tokens=task.max_new_tokens, sampling=task.sampling)
    watch = Watch(plain, task.prompts[0], task.sampling)
    watch.look()
    if known is None:
        known = _measure_acceptance(task, target, drafter, report)
    costs = _measure_costs(task, list(known), target, drafter, report, watch)
    predictions = _predictions(known, costs, fewest_rows=target.lm.min_rows)
    chosen = {batch: best(predictions, batch).way for batch in task.batches}
    of_chains = [each for each in predictions if not each.way.tree]
    chains = {batch: best(of_chains, batch).way.k for batch in task.batches}
    checked: Checked = {}
    if check_runs:
        ways = {*chosen.values(), *(Way(k=k) for k in chains.values())}
        ways.add(max(known, key=lambda way: (way.tree is None, way.k)))
        checked = _check(task, ways - {PLAIN}, target, drafter, plan.runtime.dtype, check_runs, report)
        watch.look()
    draft = speculation.draft or DRAFT
    return {
        "machine": describe_machine(plan.runtime.device),
        "arguments": task.as_json(plan.runtime),
        "acceptance": {way.name: _used(acceptance, way, source) for way, acceptance in known.items()},
        "costs_ms": {batch: _in_ms(of_batch) for batch, of_batch in costs.items()},
        "predictions": [_values(each, checked.get((each.batch, each.way))) for each in predictions],
        "chosen": {batch: way.name for batch, way in chosen.items()},
        "chains": chains,
        "vllm": vllm_config(chains, speculation.drafter, draft),
        "tensorrt_llm": tensorrt_config(chains, speculation.drafter, draft),
        "steadiness": watch.as_json(),
    }


def _used(acceptance: Acceptance, way: Way, source: str | None) -> dict[str, Any]:
    """The acceptance of a way, as JSON values."""
    return {
        "report": source,
        "spec": acceptance.spec,
        "passes": acceptance.passes(way.k),
        "has_by_round": acceptance.by_round is not None,
        "is_synthetic": acceptance.is_synthetic,
    }


def _engine(task: PlanTask, way: Way, target: Target, drafter: Drafter) -> Engine:
    return Engine(target, NoDrafter() if way == PLAIN else drafter, task.speculate(way))


def _measure_acceptance(task: PlanTask, target: Target, drafter: Drafter, report: Report) -> dict[Way, Acceptance]:
    """Acceptance of every way on all prompts, in batches of the largest planned size."""
    known: dict[Way, Acceptance] = {}
    for way in ways_of(task, drafter.max_k):
        report(f"measuring the acceptance of {way.name}")
        engine = _engine(task, way, target, drafter)
        by_round: list[tuple[int, ...]] = []
        for start in range(0, len(task.prompts), max(task.batches)):
            batch = task.prompts[start : start + max(task.batches)]
            results = engine.generate(
                batch, max_new_tokens=task.max_new_tokens, sampling=task.sampling, batch_size=len(batch)
            )
            by_round += [tuple(tokens_by_round(result.accepted, len(result.tokens))) for result in results]
        known[way] = Acceptance(
            spec=f"{task.speculation.drafter}:{way.name}",
            k=way.k,
            tree=way.tree,
            length=sum(map(sum, by_round)) / sum(map(len, by_round)),
            shares=(),
            answers=tuple(map(sum, by_round)),
            by_round=tuple(by_round),
            draft=task.speculation.draft,
        )
    return known


def _measure_costs(
    task: PlanTask, ways: list[Way], target: Target, drafter: Drafter, report: Report, watch: Watch
) -> dict[int, dict[Way, Costs]]:
    """Costs by batch size and way, plain decoding included."""
    chains = tuple(way.k for way in ways if way.tree is None)
    engines: dict[str, tuple[Engine, tuple[int, ...]]] = {PLAIN.name: (_engine(task, PLAIN, target, drafter), (0,))}
    if chains:
        engines["chains"] = (_engine(task, Way(k=max(chains)), target, drafter), chains)
    for way in ways:
        if way.tree is not None:
            engines[way.name] = (_engine(task, way, target, drafter), (way.k,))
    costs = {}
    for batch in task.batches:
        measured = measure_rounds(
            engines,
            task.prompts,
            batch=batch,
            max_new_tokens=task.max_new_tokens,
            sampling=task.sampling,
            report=report,
        )
        of_way = {way: measured["chains" if way.tree is None else way.name] for way in ways}
        costs[batch] = of_way | {PLAIN: measured[PLAIN.name]}
        watch.look()
    return costs


def _predictions(
    known: dict[Way, Acceptance], costs: dict[int, dict[Way, Costs]], *, fewest_rows: int
) -> list[Prediction]:
    answers = {way: acceptance.answers for way, acceptance in known.items()}
    passes: dict[Way, tuple[float, ...]] = {way: acceptance.passes(way.k) for way, acceptance in known.items()}
    # Plain decoding takes a pass for each token.
    answers[PLAIN] = passes[PLAIN] = next(iter(known.values())).answers
    return predict(passes, answers, costs, fewest_rows=fewest_rows)


def _check(
    task: PlanTask, ways: set[Way], target: Target, drafter: Drafter, dtype: str, runs: int, report: Report
) -> Checked:
    """Benchmarks plain decoding and some ways."""
    methods = {(batch, way): task.method(way, batch, dtype) for batch in task.batches for way in {PLAIN, *ways}}
    nothing = NoDrafter()
    answerers = {
        method: method.answerer(target, nothing if way == PLAIN else drafter) for (_, way), method in methods.items()
    }
    measured = measure(
        answerers, task.prompts, max_new_tokens=task.max_new_tokens, sampling=task.sampling, runs=runs,
        device=target.lm.device, report=report,
    )  # fmt: skip
    speeds = {result.method: statistics.median(result.tokens_per_s) for result in measured}
    figures = summarize(measured, task.sampling)
    return {
        (batch, way): {
            "tokens_per_s": speeds[method],
            "tokens_per_pass": figures[method.spec]["acceptance_length"],
            "speedup": speeds[method] / speeds[methods[batch, PLAIN]],
        }
        for (batch, way), method in methods.items()
    }


def _in_ms(costs: dict[Way, Costs]) -> dict[str, dict[str, float]]:
    """Costs of a batch size by way, in milliseconds."""
    return {
        way.name: {
            "draft": of_way.rounds[way.k].draft_s * 1e3,
            "verify": of_way.rounds[way.k].verify_s * 1e3,
            "rest": of_way.rounds[way.k].other_s * 1e3,
            "prefill": of_way.prefill_s * 1e3,
            "draft_prefill": of_way.draft_prefill_s * 1e3,
        }
        for way, of_way in costs.items()
    }


def _values(prediction: Prediction, measured: dict[str, Any] | None) -> dict[str, Any]:
    """A prediction as JSON values, with the measured figures and the error of the speedup if it was checked."""
    error = None if measured is None else prediction.speedup / measured["speedup"] - 1
    return asdict(prediction) | {
        "way": prediction.way.name,
        "k": prediction.way.k,
        "tree": prediction.way.tree,
        "measured": measured,
        "error": error,
    }

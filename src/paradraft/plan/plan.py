"""`paradraft plan`: how many tokens to draft at each batch size, predicted from measured costs and known acceptance."""

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
from paradraft.engine.loader import HERE
from paradraft.engine.preflight import fitted
from paradraft.environment import describe_machine
from paradraft.export.engines import tensorrt_config, vllm_config
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.plan.acceptance import Acceptance
from paradraft.plan.costs import Costs, measure_rounds
from paradraft.plan.predict import PLAIN, Prediction, Way, best, predict
from paradraft.plan.steadiness import Watch
from paradraft.plan.task import Task, ways_of
from paradraft.sources.loading import settled
from paradraft.sources.target_loading import load_target

Report = Callable[[str], None]
Checked = dict[tuple[int, Way], dict[str, Any]]
"""What was measured, by batch size and way."""
DRAFT = "DRAFT"
"""What stands for the draft model in the engines' lines where it has no name: that of the pocket family."""


def run_plan(
    task: Task,
    runtime: Runtime,
    *,
    known: dict[Way, Acceptance] | None,
    source: str | None,
    check_runs: int,
    report: Report,
) -> dict[str, Any]:
    """Measures costs, predicts, chooses, and on request checks.

    Args:
        task: what to plan.
        runtime: where and how models run.
        known: what is known of the acceptance, from `known_of`; None measures it.
        source: the name of the report it is from, for the record.
        check_runs: how often the predictions are checked by a benchmark; 0 for not at all.
        report: told what is going on.

    Returns:
        Plain values: `machine`, `arguments`, `acceptance`, `costs_ms`, `predictions`, `chosen`,
        `chains` (K by batch size), what `vllm` and `tensorrt_llm` are to be told, and `steadiness` of the machine.

    Raises:
        ValueError: a model cannot be loaded, or the prompts do not fit into it.
    """
    speculation = task.speculation
    runtime = fitted(settled(runtime, task.target), task.target, speculation, HERE)
    report(f"loading {task.target}")
    target = load_target(task.target, runtime)
    report(f"loading drafter {speculation.drafter}")
    drafter = load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=runtime)
    _engine(task, PLAIN, target, drafter).check(
        task.prompts, max_new_tokens=task.max_new_tokens, sampling=task.sampling
    )
    watch = Watch(_engine(task, PLAIN, target, drafter), task.prompts[0], task.sampling)
    watch.look()
    if known is None:
        known = _measure_acceptance(task, target, drafter, report)
    costs = _measure_costs(task, list(known), target, drafter, report, watch)
    predictions = _predictions(known, costs, fewest_rows=target.lm.min_rows)
    chosen = {batch: best(predictions, batch) for batch in task.batches}
    chains = {batch: best([one for one in predictions if not one.way.tree], batch).way.k for batch in task.batches}
    checked: Checked = {}
    if check_runs:
        ways = {one.way for one in chosen.values()} | {Way(k=k) for k in chains.values()}
        ways.add(max(known, key=lambda way: (way.tree is None, way.k)))
        checked = _check(task, ways - {PLAIN}, target, drafter, runtime.dtype, check_runs, report)
        watch.look()
    return {
        "machine": describe_machine(runtime.device),
        "arguments": {
            "target": task.target,
            "drafter": speculation.drafter,
            "draft": speculation.draft,
            "verify": speculation.verify,
            "prompts": task.source,
            "num_prompts": len(task.prompts),
            "max_new_tokens": task.max_new_tokens,
            "sampling": asdict(task.sampling),
            "runtime": asdict(runtime),
        },
        "acceptance": {
            way.name: {
                "report": source,
                "spec": one.spec,
                "passes": one.passes(way.k),
                "has_by_round": one.by_round is not None,
                "is_synthetic": one.is_synthetic,
            }
            for way, one in known.items()
        },
        "costs_ms": {batch: {way.name: _in_ms(one, way.k) for way, one in of.items()} for batch, of in costs.items()},
        "predictions": [_values(one, checked.get((one.batch, one.way))) for one in predictions],
        "chosen": {batch: one.way.name for batch, one in chosen.items()},
        "chains": chains,
        "vllm": vllm_config(chains, speculation.drafter, speculation.draft or DRAFT),
        "tensorrt_llm": tensorrt_config(chains, speculation.drafter, speculation.draft or DRAFT),
        "steadiness": watch.as_json(),
    }


def _engine(task: Task, way: Way, target: Target, drafter: Drafter) -> Engine:
    return Engine(target, NoDrafter() if way == PLAIN else drafter, task.speculate(way))


def _measure_acceptance(task: Task, target: Target, drafter: Drafter, report: Report) -> dict[Way, Acceptance]:
    """Lets every way answer all prompts once, in the largest batches."""
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
    task: Task, ways: list[Way], target: Target, drafter: Drafter, report: Report, watch: Watch
) -> dict[int, dict[Way, Costs]]:
    """What every way's rounds take at every batch size, plain decoding's too."""
    chains = tuple(way.k for way in ways if way.tree is None)
    engines: dict[str, tuple[Engine, tuple[int, ...]]] = {PLAIN.name: (_engine(task, PLAIN, target, drafter), (0,))}
    if chains:
        engines["chains"] = (_engine(task, Way(k=max(chains)), target, drafter), chains)
    for way in ways:
        if way.tree is not None:
            engines[way.name] = (_engine(task, way, target, drafter), (way.k,))
    costs = {}
    for batch in task.batches:
        found = measure_rounds(
            engines,
            task.prompts,
            batch=batch,
            max_new_tokens=task.max_new_tokens,
            sampling=task.sampling,
            report=report,
        )
        of_way = {way: found["chains" if way.tree is None else way.name] for way in ways}
        costs[batch] = of_way | {PLAIN: found[PLAIN.name]}
        watch.look()
    return costs


def _predictions(
    known: dict[Way, Acceptance], costs: dict[int, dict[Way, Costs]], *, fewest_rows: int
) -> list[Prediction]:
    answers = {way: one.answers for way, one in known.items()}
    passes: dict[Way, tuple[float, ...]] = {way: one.passes(way.k) for way, one in known.items()}
    # Plain decoding takes a pass for each token.
    answers[PLAIN] = passes[PLAIN] = next(iter(known.values())).answers
    return predict(passes, answers, costs, fewest_rows=fewest_rows)


def _check(
    task: Task, ways: set[Way], target: Target, drafter: Drafter, dtype: str, runs: int, report: Report
) -> Checked:
    """What a benchmark of plain decoding and some ways measures, by batch size and way."""
    asked = {(batch, way): task.method(way, batch, dtype) for batch in task.batches for way in {PLAIN, *ways}}
    nothing = NoDrafter()
    answerers = {
        method: method.answerer(target, nothing if way == PLAIN else drafter) for (_, way), method in asked.items()
    }
    measured = measure(
        answerers, task.prompts, max_new_tokens=task.max_new_tokens, sampling=task.sampling, runs=runs,
        device=target.lm.device, report=report,
    )  # fmt: skip
    speeds = {one.method: statistics.median(one.tokens_per_s) for one in measured}
    figures = summarize(measured, task.sampling)
    return {
        (batch, way): {
            "tokens_per_s": speeds[method],
            "tokens_per_pass": figures[method.spec]["acceptance_length"],
            "speedup": speeds[method] / speeds[asked[batch, PLAIN]],
        }
        for (batch, way), method in asked.items()
    }


def _in_ms(costs: Costs, k: int) -> dict[str, float]:
    one = costs.rounds[k]
    return {
        "draft": one.draft_s * 1e3,
        "verify": one.verify_s * 1e3,
        "rest": one.other_s * 1e3,
        "prefill": costs.prefill_s * 1e3,
        "draft_prefill": costs.draft_prefill_s * 1e3,
    }


def _values(one: Prediction, measured: dict[str, Any] | None) -> dict[str, Any]:
    """A prediction as plain values, with what was measured and the error of the speedup if it was checked."""
    error = None if measured is None else one.speedup / measured["speedup"] - 1
    return asdict(one) | {
        "way": one.way.name,
        "k": one.way.k,
        "tree": one.way.tree,
        "measured": measured,
        "error": error,
    }

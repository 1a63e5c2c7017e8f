"""Runs a benchmark: prepares, measures, summarizes (`paradraft bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paradraft.bench.baselines.process import EngineProcess, running
from paradraft.bench.hardware.bandwidth import Speeds
from paradraft.bench.hardware.profile import profile
from paradraft.bench.hardware.roofline import Size, added, reached, speeds_for
from paradraft.bench.hardware.sides import of_sides
from paradraft.bench.harness import Measured, measure, summarize
from paradraft.bench.result import Piece, by_round, pieces
from paradraft.bench.setup import PLAIN, BenchSetup, Workload, check, prepare
from paradraft.bench.spec import Benchmark, Method
from paradraft.bench.steadiness import steadiness
from paradraft.bench.synthetic import SyntheticAcceptance, rounds
from paradraft.digests import model_digest
from paradraft.engine.engine import Engine
from paradraft.engine.loader import check_memory, resolve
from paradraft.environment import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.build import kernel_names
from paradraft.sources.load_plan import Checkpoint, LoadPlan, settled, shared
from paradraft.verify import Verify, load_rule


def run_benchmark(
    benchmark: Benchmark, works: Sequence[Workload], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures all workloads, one after the other; models are loaded once.

    Returns:
        For each workload a report of plain values: `machine`, `arguments`, `speeds` (of the machine), `methods` (the
        summary), `steadiness` of the machine, `profile` if requested, `answers` with every raw time, the tokens of the
        first run and how many each target pass gave, and `example`: the first prompt, and for each method that reports
        the origin of tokens the pieces of its answer, see `paradraft.bench.result`.

    Raises:
        ValueError: a model cannot be loaded, two methods are the same, prompts do not fit, or a shape has no synthetic
            acceptance.
    """
    target = Checkpoint.find(benchmark.target)
    benchmark = replace(benchmark, runtime=settled(target, benchmark.runtime))
    for work in works:
        check(benchmark, work.count)
    plans = _plans_of(benchmark, target)
    benchmark = replace(benchmark, runtime=shared(benchmark.runtime, list(plans.values())))
    plans = _plans_of(benchmark, target)
    for plan in plans.values():
        check_memory(plan)
    prepared = prepare(benchmark, plans, report)
    prompts = [work.prompts(prepared.answers(benchmark.methods[0], benchmark.sampling, report)) for work in works]
    for work, texts in zip(works, prompts, strict=True):
        prepared.check(texts, max_new_tokens=work.max_new_tokens)
    report("measuring how fast this machine reads and multiplies")
    speeds = speeds_for([lm for models in prepared.models.values() for lm in models.values()])
    measured = []
    with running(prepared.answerers.values(), report) as versions:
        for work, texts in zip(works, prompts, strict=True):
            measurements = measure(
                prepared.answerers, texts, max_new_tokens=work.max_new_tokens, sampling=benchmark.sampling,
                runs=benchmark.runs, device=torch.device(benchmark.runtime.device), report=_named(work, report),
            )  # fmt: skip
            measured.append(measurements)
    speeds.measure()  # again, because another program may have slowed down the first measurement
    machine = describe_machine(benchmark.runtime.device)
    machine["versions"] |= versions
    machine["kernels"] = kernel_names()
    return [
        _result(benchmark, prepared, work, texts, measurements, speeds, report) | {"machine": machine}
        for work, texts, measurements in zip(works, prompts, measured, strict=True)
    ]


def _plans_of(benchmark: Benchmark, target: Checkpoint) -> dict[Method, LoadPlan]:
    return {
        method: resolve(target, [method.speculation], benchmark.runtime, method.placement, dtype=method.loaded_dtype)
        for method in benchmark.methods
    }


def _result(
    benchmark: Benchmark,
    prepared: BenchSetup,
    work: Workload,
    prompts: list[str],
    measured: list[Measured],
    speeds: Speeds,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The report of one workload, without the machine."""
    profiles = {}
    for method in prepared.engines if benchmark.profiled else ():
        report(f"profiling {method.spec}")
        profiles[method.spec] = _profile(
            benchmark, prepared.engines[method], prompts[: method.batch], work.max_new_tokens
        )
    methods = _summary(benchmark, work, measured, prepared, speeds)
    arguments = {"prompts": work.source, "num_prompts": len(prompts), "max_new_tokens": work.max_new_tokens}
    return {
        "arguments": {**benchmark.as_json(), **arguments},
        "speeds": speeds.as_json(),
        "methods": methods,
        "steadiness": steadiness(methods),
        **({"profile": profiles} if benchmark.profiled else {}),
        "answers": _answers(measured),
        "timeline": {
            result.method.spec: result.runs[0][0].sides.timeline()
            for result in measured
            if result.runs[0][0].sides is not None
        },
        "example": {"prompt": prompts[0], "answers": _first_answers(measured, prepared)},
    }


def _named(work: Workload, report: Callable[[str], None]) -> Callable[[str], None]:
    return (lambda message: report(f"{work.name}: {message}")) if work.name else report


def _summary(
    benchmark: Benchmark, work: Workload, measured: list[Measured], prepared: BenchSetup, speeds: Speeds
) -> dict[str, dict[str, Any]]:
    """The figures of each method, with its floor, right answers and synthetic acceptance."""
    summary = summarize(measured, benchmark.sampling)
    for result in measured:
        summary[result.method.spec] |= _floor(
            result, summary[result.method.spec], prepared.models[result.method], speeds
        )
        summary[result.method.spec]["right"] = _right_share(work, result, prepared)
        summary[result.method.spec] |= _drawn(result.method, benchmark.acceptance)
        summary[result.method.spec]["sides"] = of_sides([answer.sides for run in result.runs for answer in run])
        summary[result.method.spec]["engine"] = _engine(result, prepared)
        summary[result.method.spec]["weights"] = _weights(prepared.models[result.method])
        summary[result.method.spec]["refusals"] = {
            name: lm.refusals for name, lm in prepared.models[result.method].items() if lm.refusals
        }
    return summary


def _profile(benchmark: Benchmark, engine: Engine, prompts: list[str], max_new_tokens: int) -> dict[str, Any] | None:
    """The shares of the time of a method's rounds."""
    verify: Verify = load_rule(engine.speculation.verify)
    if benchmark.acceptance is not None:
        verify = benchmark.acceptance.instead_of(verify)
    batch, samplings = engine.new_batch(verify=verify), [benchmark.sampling] * len(prompts)
    return profile(rounds(batch, prompts, max_new_tokens, samplings), engine.target.device)


def _answers(measured: list[Measured]) -> dict[str, dict[str, Any]]:
    """The answers by spec: all times, and of the first run the tokens of each answer and of each target pass."""
    return {
        result.method.spec: {
            "total_s": [[answer.total_s for answer in run] for run in result.runs],
            "tokens": [tokens for answer in result.runs[0] for tokens in answer.tokens],
            "by_round": by_round(result.runs[0]) or None,
        }
        for result in measured
    }


def _first_answers(measured: list[Measured], prepared: BenchSetup) -> dict[str, list[Piece]]:
    """The answer to the first prompt, by each method that reports the origin of tokens."""
    examples = {}
    for result in measured:
        answer, tokenizer = result.runs[0][0], prepared.targets[result.method.target_key].tokenizer
        if answer.accepted is not None:
            examples[result.method.spec] = pieces(answer.tokens[0], answer.accepted[0], tokenizer.decode)
    return examples


def _right_share(work: Workload, result: Measured, prepared: BenchSetup) -> float | None:
    """The share of right answers in the first run; None where they are not marked."""
    if work.right_share is None:
        return None
    tokenizer = prepared.targets[result.method.target_key].tokenizer
    texts = [
        tokenizer.decode(tokens, skip_special_tokens=True) for answer in result.runs[0] for tokens in answer.tokens
    ]
    return work.right_share(texts)


def _floor(result: Measured, figures: dict[str, Any], models: dict[str, CausalLM], speeds: Speeds) -> dict[str, Any]:
    sizes = {name: Size.of(lm.model, lm.weight_bytes) for name, lm in models.items()}
    passes = added([answer.passes for run in result.runs for answer in run])
    return reached(passes, sizes, speeds, total_s=figures["total_s"], prefill_s=figures["prefill_s"])


def _engine(result: Measured, prepared: BenchSetup) -> dict[str, Any] | None:
    """Facts about an engine in another process, and the passes of its models in all answers."""
    process = prepared.answerers[result.method]
    if not isinstance(process, EngineProcess):
        return None
    known = [answer.engine_passes for run in result.runs for answer in run if answer.engine_passes is not None]
    passes = {part: sum(passes[part] for passes in known) for part in known[0]} if known else None
    return {**process.facts, "passes": passes}


def _weights(models: dict[str, CausalLM]) -> dict[str, str]:
    """Digests of the weights of a method's models that are in local folders."""
    folders = {part: Path(lm.model.name_or_path) for part, lm in models.items() if lm.model.name_or_path}
    return {part: model_digest(folder)[:16] for part, folder in folders.items() if folder.is_dir()}


def _drawn(method: Method, acceptance: SyntheticAcceptance | None) -> dict[str, Any]:
    """The figures of synthetic acceptance; texts cannot be compared then."""
    if acceptance is None:
        return {"synthetic_acceptance": None}
    rates = None if method.name in PLAIN else acceptance.rates
    return {"synthetic_acceptance": rates, **dict.fromkeys(("identical_to_ar", "differing_prompts", "advice", "right"))}

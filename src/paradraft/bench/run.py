"""`paradraft bench`: prepare, measure, summarize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paradraft.bench.answer import tokens_by_round
from paradraft.bench.harness import Measured, measure, summarize
from paradraft.bench.methods import AR, Method
from paradraft.bench.origins import Piece, pieces
from paradraft.bench.peers import HF
from paradraft.bench.preparation import Preparation, check, prepare
from paradraft.bench.profile import profile
from paradraft.bench.questions import Answers
from paradraft.bench.roofline import Size, added, reached, speeds_for
from paradraft.bench.rounds import clock_for, rounds
from paradraft.bench.speeds import Speeds
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.bench.vllm_methods import running
from paradraft.core import Sampling
from paradraft.decode.sequential import VERIFY
from paradraft.machine import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.loading import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts that all methods answer.

    Args:
        count: how many there are.
        max_new_tokens: most tokens of an answer.
        prompts: what they are, given what asks the target; some hold its own answers to others.
        name: of the task, if it is one.
    """

    count: int
    max_new_tokens: int
    prompts: Callable[[Answers], list[str]]
    name: str = ""


def run_bench(
    target: str,
    methods: list[Method],
    prompts: list[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    runtime: Runtime,
    runs: int,
    report: Callable[[str], None],
    acceptance: SyntheticAcceptance | None = None,
    profiled: bool = False,
    vllm_python: Path | None = None,
) -> dict[str, Any]:
    """Measures methods on one target and one list of prompts; arguments, result and mistakes as of `run_works`."""
    work = Work(count=len(prompts), max_new_tokens=max_new_tokens, prompts=lambda _: prompts)
    (found,) = run_works(
        target, methods, [work], sampling=sampling, runtime=runtime, runs=runs, report=report, acceptance=acceptance,
        profiled=profiled, vllm_python=vllm_python,
    )  # fmt: skip
    return found


def run_works(
    target: str,
    methods: list[Method],
    works: Sequence[Work],
    *,
    sampling: Sampling,
    runtime: Runtime,
    runs: int,
    report: Callable[[str], None],
    acceptance: SyntheticAcceptance | None = None,
    profiled: bool = False,
    vllm_python: Path | None = None,
) -> list[dict[str, Any]]:
    """Measures methods on one target, one work after the other; models are loaded once.

    Args:
        target: whose answers are timed; a shape is, too.
        methods: ways to decode.
        works: what is answered, at least one.
        sampling: the same for all methods.
        runtime: the same for all methods, but for the dtype.
        runs: how often everything is repeated.
        report: told what is going on.
        acceptance: replaces the verdicts of all methods that draft; then no answer ends before its last token.
        profiled: profile some rounds of each method of ours, after all have been timed.
        vllm_python: the Python of vLLM's environment, for methods that run there; None for the usual place.

    Returns:
        For each work a report of plain values: `machine`, `arguments`, `speeds` (of the machine), `methods` (the
        summary), `profile` if it was asked for, `answers` with every raw time, the tokens of the first run and how
        many each target pass gave, and `example`: the first prompt, and for each method that tells how its tokens
        came the pieces of its answer, see `paradraft.bench.origins`.

    Raises:
        ValueError: a model cannot be loaded, two methods are the same, prompts do not fit, or shapes are to accept
            tokens by themselves.
    """
    for work in works:
        check(methods, target, work.count, sampling=sampling, runtime=runtime, acceptance=acceptance)
    prepared = prepare(target, methods, runtime=runtime, report=report, acceptance=acceptance, vllm_python=vllm_python)
    prompts = [work.prompts(prepared.answers(methods[0], sampling, report)) for work in works]
    for work, texts in zip(works, prompts, strict=True):
        prepared.check(texts, max_new_tokens=work.max_new_tokens)
    report("measuring how fast this machine reads and multiplies")
    speeds = speeds_for([lm for models in prepared.models.values() for lm in models.values()])
    measured = []
    with running(prepared.answerers.values(), report) as versions:
        for work, texts in zip(works, prompts, strict=True):
            found = measure(
                prepared.answerers, texts, max_new_tokens=work.max_new_tokens, sampling=sampling, runs=runs,
                report=_of(work, report),
            )  # fmt: skip
            measured.append(found)
    speeds.measure()  # once more: a program beside the first time would make floors that are easily reached
    machine = describe_machine(runtime.device)
    machine["versions"] |= versions
    common = {
        "target": target,
        "methods": [method.spec for method in methods],
        "runs": runs,
        "sampling": asdict(sampling),
        "runtime": asdict(runtime),
        "synthetic_acceptance": None if acceptance is None else acceptance.rates,
    }
    results = []
    for work, texts, each in zip(works, prompts, measured, strict=True):
        limit = work.max_new_tokens
        profiles = {}
        for method in prepared.engines if profiled else ():
            report(f"profiling {method.spec}")
            profiles[method.spec] = _profile(prepared, method, texts, limit, sampling, acceptance)
        one = {
            "machine": machine,
            "arguments": {**common, "num_prompts": len(texts), "max_new_tokens": limit},
            "speeds": speeds.as_json(),
            "methods": _summary(each, prepared, sampling, speeds, acceptance),
            **({"profile": profiles} if profiled else {}),
            "answers": _answers(each),
            "example": {"prompt": texts[0], "answers": _first_answers(each, prepared.targets)},
        }
        results.append(one)
    return results


def _of(work: Work, report: Callable[[str], None]) -> Callable[[str], None]:
    return (lambda news: report(f"{work.name}: {news}")) if work.name else report


def _summary(
    measured: list[Measured],
    prepared: Preparation,
    sampling: Sampling,
    speeds: Speeds,
    acceptance: SyntheticAcceptance | None,
) -> dict[str, dict[str, Any]]:
    """The figures of each method, with its floor and what was drawn."""
    summary = summarize(measured, sampling)
    for one in measured:
        summary[one.method.spec] |= _floor(one, summary[one.method.spec], prepared.models[one.method], speeds)
        summary[one.method.spec] |= _drawn(one.method, acceptance)
    return summary


def _profile(
    prepared: Preparation,
    method: Method,
    prompts: list[str],
    max_new_tokens: int,
    sampling: Sampling,
    acceptance: SyntheticAcceptance | None,
) -> dict[str, Any] | None:
    """Where the time of a method's rounds goes."""
    engine = prepared.engines[method]
    verify = VERIFY[engine.verify] if acceptance is None else acceptance.instead_of(VERIFY[engine.verify])
    batch = prompts[: method.batch]
    steps = rounds(engine, batch, max_new_tokens, [sampling] * len(batch), verify, clock_for(engine))
    return profile(steps, engine.target.lm.device)


def _answers(measured: list[Measured]) -> dict[str, dict[str, Any]]:
    """What each method answered, by its spec: all times, and of the first run the tokens of each answer, and how many
    of them each target pass gave."""
    return {
        one.method.spec: {
            "total_s": [[answer.total_s for answer in run] for run in one.runs],
            "tokens": [tokens for answer in one.runs[0] for tokens in answer.tokens],
            "by_round": [
                tokens_by_round(accepted, len(tokens))
                for answer in one.runs[0]
                for accepted, tokens in zip(answer.accepted or (), answer.tokens, strict=answer.accepted is not None)
            ]
            or None,
        }
        for one in measured
    }


def _first_answers(measured: list[Measured], targets: dict[str, Target]) -> dict[str, list[Piece]]:
    """The answer to the first prompt, by each method that tells how its tokens came."""
    found = {}
    for one in measured:
        answer, tokenizer = one.runs[0][0], targets[one.method.dtype].tokenizer
        if answer.accepted is not None:
            found[one.method.spec] = pieces(answer.tokens[0], answer.accepted[0], tokenizer.decode)
    return found


def _floor(one: Measured, figures: dict[str, Any], models: dict[str, CausalLM], speeds: Speeds) -> dict[str, Any]:
    """Which share of the floor a method reaches."""
    sizes = {name: Size.of(lm.model) for name, lm in models.items()}
    passes = added([answer.passes for run in one.runs for answer in run])
    return reached(passes, sizes, speeds, total_s=figures["total_s"], prefill_s=figures["prefill_s"])


def _drawn(method: Method, acceptance: SyntheticAcceptance | None) -> dict[str, Any]:
    """What the figures say of drawn verdicts; the texts of no method can be compared then."""
    if acceptance is None:
        return {"synthetic_acceptance": None}
    rates = None if method.name in (HF, AR) else acceptance.rates
    return {"synthetic_acceptance": rates, "identical_to_ar": None, "differing_prompts": None}

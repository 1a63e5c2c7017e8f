"""`paradraft bench`: prepare, measure, summarize, write."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paradraft.api import check_draft, drafter_names, takes_draft
from paradraft.bench.harness import Measured, check_batches, measure, summarize
from paradraft.bench.methods import AR, HF, Answerer, Method
from paradraft.bench.profile import profile
from paradraft.bench.roofline import Size, added, models_of, reached, speeds_for
from paradraft.bench.rounds import clock_for, rounds
from paradraft.bench.speeds import Speeds
from paradraft.bench.synthetic import Acceptance, without_ends
from paradraft.core import Drafter, Sampling
from paradraft.decode.sequential import VERIFY
from paradraft.engine import Engine
from paradraft.machine import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.loading import Runtime, load_target, pocket_folder
from paradraft.models.shapes import is_shape, shape_of
from paradraft.models.target import Target
from paradraft.prompts import read_prompts


def held_out_prompts(number: int, file: Path | None) -> list[str]:
    """The first prompts of a file; without one, of the pocket family's held-out modules.

    Raises:
        ValueError: the file cannot be read or has fewer prompts.
    """
    file = file or pocket_folder("prompts.jsonl")
    records = read_prompts(file)
    if not 1 <= number <= len(records):
        raise ValueError(f"num_prompts={number}: use 1 to {len(records)}, which is how many {file.name} has")
    return [str(record["prompt"]) for record in records[:number]]


def prompts_for(target: str, number: int, *, tokens: int, file: Path | None) -> list[str]:
    """The prompts of a run: random ones of so many tokens for a shape, which reads no texts, else those of a file.

    Raises:
        ValueError: there is no such shape or file, or a shape is to read a file.
    """
    if not is_shape(target):
        return held_out_prompts(number, file)
    found = random_prompts(target, number, tokens)
    if file is not None:
        raise ValueError(f"--prompts {file}: {target!r} reads no texts, its prompts are random: give --prompt-tokens")
    return found


def random_prompts(shape: str, number: int, tokens: int) -> list[str]:
    """Prompts for a shape: random token ids, written as its tokenizer reads them.

    Raises:
        ValueError: there is no such shape, or a number is below 1.

    >>> random_prompts("shape:tiny-target", 2, 3)
    ['49 53 5', '33 65 62']
    """
    if number < 1 or tokens < 1:
        raise ValueError(f"num_prompts={number}, prompt_tokens={tokens}: use at least 1")
    chooser, ids = random.Random(0), shape_of(shape).mask_id
    return [" ".join(str(chooser.randrange(ids)) for _ in range(tokens)) for _ in range(number)]


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
    acceptance: Acceptance | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """Measures methods on one target.

    Args:
        target: whose answers are timed; a shape is, too.
        methods: ways to decode.
        prompts: what is answered.
        max_new_tokens: most tokens of an answer.
        sampling: the same for all methods.
        runtime: the same for all methods, but for the dtype.
        runs: how often everything is repeated.
        report: told what is going on.
        acceptance: replaces the verdicts of all methods that draft; then no answer ends before its last token.
        profiled: profile some rounds of each method of ours, after all have been timed.

    Returns:
        A report of plain values: `machine`, `arguments`, `speeds` (of the machine), `methods` (the summary),
        `profile` if it was asked for, and `answers` with every raw time, the tokens of the first run and how many
        each target pass gave.

    Raises:
        ValueError: a model cannot be loaded, two methods are the same, or shapes are to accept tokens by themselves.
    """
    if not methods:
        raise ValueError("methods: name at least one")
    for place, method in enumerate(methods):
        if method in methods[:place]:
            same = methods[methods.index(method)].spec
            raise ValueError(f"methods: {same!r} and {method.spec!r} are the same, name each only once")
    check_batches(methods, prompts)
    _check_acceptance(methods, target, acceptance)
    for method in methods:
        if method.name in drafter_names() and takes_draft(method.name):
            check_draft(method.name, method.draft, target)
    answerers: dict[Method, Answerer] = {}
    models: dict[Method, dict[str, CausalLM]] = {}
    engines: dict[Method, Engine] = {}
    targets: dict[str, Target] = {}
    drafters: dict[tuple[str, str | None, str], Drafter] = {}
    for method in methods:
        report(f"loading {method.spec}")
        of_dtype = replace(runtime, dtype=method.dtype)
        if method.dtype not in targets:
            targets[method.dtype] = load_target(target, of_dtype)
            if acceptance is not None:
                without_ends(targets[method.dtype])
        key = (method.drafter_name, method.draft, method.dtype)
        if key not in drafters:
            drafters[key] = method.load_drafter(targets[method.dtype], of_dtype)
        if method.name in (AR, *drafter_names()):
            engines[method] = method.engine(targets[method.dtype], drafters[key])
        if acceptance is not None and method.name not in (HF, AR):
            answerers[method] = acceptance.answerer(engines[method])
        else:
            answerers[method] = method.answerer(targets[method.dtype], drafters[key])
        models[method] = models_of(targets[method.dtype].lm, drafters[key])
        Engine(targets[method.dtype], drafters[key], k=1).check(prompts, max_new_tokens=max_new_tokens)
    report("measuring how fast this machine reads and multiplies")
    speeds = speeds_for([lm for of_method in models.values() for lm in of_method.values()])
    measured = measure(answerers, prompts, max_new_tokens=max_new_tokens, sampling=sampling, runs=runs, report=report)
    speeds.measure()  # once more: a program beside the first time would make floors that are easily reached
    summary = summarize(measured, sampling)
    for one in measured:
        summary[one.method.spec] |= _floor(one, summary[one.method.spec], models[one.method], speeds)
        summary[one.method.spec] |= _drawn(one.method, acceptance)
    profiles = {}
    for method, engine in engines.items() if profiled else ():
        report(f"profiling {method.spec}")
        verify = VERIFY[engine.verify] if acceptance is None else acceptance.instead_of(VERIFY[engine.verify])
        batch = prompts[: method.batch]
        steps = rounds(engine, batch, max_new_tokens, [sampling] * len(batch), verify, clock_for(engine))
        profiles[method.spec] = profile(steps, engine.target.lm.device)
    return {
        "machine": describe_machine(runtime.device),
        "arguments": {
            "target": target,
            "methods": [method.spec for method in methods],
            "num_prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "runs": runs,
            "sampling": asdict(sampling),
            "runtime": asdict(runtime),
            "synthetic_acceptance": None if acceptance is None else acceptance.rates,
        },
        "speeds": speeds.as_json(),
        "methods": summary,
        **({"profile": profiles} if profiled else {}),
        "answers": answers(measured),
    }


def answers(measured: list[Measured]) -> dict[str, dict[str, Any]]:
    """What each method answered, by its spec: all times, and of the first run the tokens of each answer, and how many
    of them each target pass gave."""
    return {
        one.method.spec: {
            "total_s": [[answer.total_s for answer in run] for run in one.runs],
            "tokens": [tokens for answer in one.runs[0] for tokens in answer.tokens],
            "by_round": [rounds for answer in one.runs[0] for rounds in answer.by_round or ()] or None,
        }
        for one in measured
    }


def _floor(one: Measured, figures: dict[str, Any], models: dict[str, CausalLM], speeds: Speeds) -> dict[str, Any]:
    """Which share of the floor a method reaches."""
    sizes = {name: Size.of(lm.model) for name, lm in models.items()}
    passes = added([answer.passes for run in one.runs for answer in run])
    return reached(passes, sizes, speeds, total_s=figures["total_s"], prefill_s=figures["prefill_s"])


def _drawn(method: Method, acceptance: Acceptance | None) -> dict[str, Any]:
    """What the figures say of drawn verdicts; the texts of no method can be compared then."""
    if acceptance is None:
        return {"synthetic_acceptance": None}
    rates = None if method.name in (HF, AR) else acceptance.rates
    return {"synthetic_acceptance": rates, "identical_to_ar": None, "differing_prompts": None}


def _check_acceptance(methods: list[Method], target: str, acceptance: Acceptance | None) -> None:
    """Raises ValueError unless it is clear what each method will accept."""
    for method in methods:
        if method.name in (HF, AR):
            continue
        if acceptance is not None:
            if method.name not in drafter_names():
                raise ValueError(
                    f"method {method.spec!r} has verdicts of its own: leave it out of synthetic acceptance"
                )
            acceptance.check(method.spec, k=method.k, tree=method.tree)
            continue
        for name in (target, method.draft or ""):
            if is_shape(name):
                raise ValueError(
                    f"method {method.spec!r}: {name!r} has random weights, whose drafts are accepted by chance only: "
                    "add --synthetic-acceptance, or measure hf and ar alone"
                )

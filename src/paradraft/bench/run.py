"""`paradraft bench`: prepare, measure, summarize, write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paradraft.api import check_draft, drafter_names, takes_draft
from paradraft.bench.harness import Measured, check_batches, measure, summarize
from paradraft.bench.methods import Answerer, Method
from paradraft.core import Drafter, Sampling
from paradraft.engine import Engine
from paradraft.machine import describe_machine
from paradraft.models.loading import Runtime, load_target, pocket_folder
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
) -> dict[str, Any]:
    """Measures methods on one target.

    Returns:
        A report of plain values: `machine`, `arguments`, `methods` (the summary), and `answers`
        with every raw time, the tokens of the first run and how many each target pass gave.

    Raises:
        ValueError: a model cannot be loaded, or two methods are the same.
    """
    if not methods:
        raise ValueError("methods: name at least one")
    for place, method in enumerate(methods):
        if method in methods[:place]:
            same = methods[methods.index(method)].spec
            raise ValueError(f"methods: {same!r} and {method.spec!r} are the same, name each only once")
    check_batches(methods, prompts)
    for method in methods:
        if method.name in drafter_names() and takes_draft(method.name):
            check_draft(method.name, method.draft, target)
    answerers: dict[Method, Answerer] = {}
    targets: dict[str, Target] = {}
    drafters: dict[tuple[str, str | None, str], Drafter] = {}
    for method in methods:
        report(f"loading {method.spec}")
        of_dtype = replace(runtime, dtype=method.dtype)
        if method.dtype not in targets:
            targets[method.dtype] = load_target(target, of_dtype)
        key = (method.drafter_name, method.draft, method.dtype)
        if key not in drafters:
            drafters[key] = method.load_drafter(targets[method.dtype], of_dtype)
        answerers[method] = method.answerer(targets[method.dtype], drafters[key])
        Engine(targets[method.dtype], drafters[key], k=1).check(prompts, max_new_tokens=max_new_tokens)
    measured = measure(answerers, prompts, max_new_tokens=max_new_tokens, sampling=sampling, runs=runs, report=report)
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
        },
        "methods": summarize(measured, sampling),
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

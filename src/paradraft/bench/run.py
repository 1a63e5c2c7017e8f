"""`paradraft bench`: prepare, measure, summarize, write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paradraft.api import check_draft, takes_draft
from paradraft.bench.answer import Answerer
from paradraft.bench.harness import Measured, check_batches, measure, summarize
from paradraft.bench.methods import Method
from paradraft.bench.origins import Piece, pieces
from paradraft.bench.peers import is_vllm
from paradraft.bench.vllm_methods import check_vllm, running, what_to_load
from paradraft.bench.vllm_process import VllmProcess
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
    vllm_python: Path | None = None,
) -> dict[str, Any]:
    """Measures methods on one target.

    Args:
        vllm_python: the Python of vLLM's environment, for methods that run there; None for the usual place.

    Returns:
        A report of plain values: `machine`, `arguments`, `methods` (the summary), `answers` with
        every raw time and the tokens of the first run, and `example`: the first prompt, and for each
        method that tells how its tokens came the pieces of its answer, see `paradraft.bench.origins`.

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
        if takes_draft(method.drafter_name):
            check_draft(method.drafter_name, method.draft, target)
    check_vllm(methods, sampling, runtime)
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
        Engine(targets[method.dtype], drafters[key], k=1).check(prompts, max_new_tokens=max_new_tokens)
        if is_vllm(method.name):
            given = what_to_load(method, target, targets[method.dtype], drafters[key], compiled=runtime.compiled)
            answerers[method] = VllmProcess(method.spec, vllm_python, given, targets[method.dtype])
        else:
            answerers[method] = method.answerer(targets[method.dtype], drafters[key])
    with running(answerers.values(), report) as versions:
        measured = measure(
            answerers, prompts, max_new_tokens=max_new_tokens, sampling=sampling, runs=runs, report=report
        )
    machine = describe_machine(runtime.device)
    machine["versions"] |= versions
    return {
        "machine": machine,
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
        "answers": {
            one.method.spec: {
                "total_s": [[answer.total_s for answer in run] for run in one.runs],
                "tokens": [tokens for answer in one.runs[0] for tokens in answer.tokens],
            }
            for one in measured
        },
        "example": {"prompt": prompts[0], "answers": _first_answers(measured, targets)},
    }


def _first_answers(measured: list[Measured], targets: dict[str, Target]) -> dict[str, list[Piece]]:
    """The answer to the first prompt, by each method that tells how its tokens came."""
    found = {}
    for one in measured:
        answer, tokenizer = one.runs[0][0], targets[one.method.dtype].tokenizer
        if answer.accepted is not None:
            found[one.method.spec] = pieces(answer.tokens[0], answer.accepted[0], tokenizer.decode)
    return found

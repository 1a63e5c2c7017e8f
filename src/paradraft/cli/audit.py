"""`paradraft audit`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paradraft.api import drafter_names, load
from paradraft.cli.options import (
    Capacity,
    Compile,
    Device,
    Draft,
    Dtype,
    FrequencyPenalty,
    K,
    Lengths,
    MinP,
    NewTokens,
    PresencePenalty,
    Prompts,
    RepetitionPenalty,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeBudget,
    TreePaths,
    Verify,
    check_writable,
    tree_of,
    width_of,
)
from paradraft.core import Sampling
from paradraft.models.loading import Runtime


def audit(
    target: Target,
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(drafter_names())}.")],
    draft: Draft = None,
    k: K = 8,
    prompts: Prompts = None,
    num_prompts: Annotated[int, typer.Option(help="How many prompts of the file to use.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Answers per prompt, when sampling.")] = 4,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = 0,
    verify: Verify = "match",
    tree_budget: TreeBudget = None,
    tree_paths: TreePaths = None,
    lengths: Lengths = "fixed",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts answered together with the drafter; by default 4, or 1 if shape-invariant."),
    ] = None,
    shape_invariant: Annotated[
        bool, typer.Option("--shape-invariant", help="Let plain decoding run through passes as wide as the drafter's.")
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    compile: Compile = False,
    capacity: Capacity = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every finding to this file.")] = None,
) -> None:
    """Check that a drafter changes nothing: same tokens, or same distribution.

    Says PASS, PASS UP TO NUMERICAL TIES, or FAIL; the exit code of FAIL is 1. The last line is JSON.
    """
    from paradraft.bench.audit import FAIL, audit
    from paradraft.bench.report import findings, write_json
    from paradraft.bench.run import held_out_prompts
    from paradraft.machine import describe_machine

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    tree = tree_of(tree_budget, tree_paths)
    texts = held_out_prompts(num_prompts, prompts)
    if shape_invariant and batch_size not in (None, 1):
        raise ValueError(f"--shape-invariant --batch-size {batch_size}: a batch has another shape, leave its size out")
    batch_size = batch_size or (1 if shape_invariant else 4)
    check_writable(json_file)
    pad_to = 1 + (k if tree is None else tree.nodes) if shape_invariant else 1
    runtime = Runtime(
        device=device,
        dtype=dtype,
        compiled=compile,
        capacity=capacity,
        width=width_of(k, nodes=tree.nodes if tree else 0),
        pad_to=pad_to,
    )
    engine = load(target, drafter=drafter, draft=draft, k=k, verify=verify, tree=tree, lengths=lengths, runtime=runtime)
    console = Console(stderr=True, highlight=False)
    with console.status("preparing") as status:
        report = audit(
            engine, texts, sampling=sampling, seeds=seeds, max_new_tokens=max_new_tokens, batch_size=batch_size,
            report=status.update,
        )  # fmt: skip
    arguments = {
        "target": target, "drafter": drafter, "draft": draft, "k": k, "tree": None if tree is None else asdict(tree),
        "verify": verify, "lengths": lengths, "num_prompts": num_prompts, "seeds": seeds, "batch_size": batch_size,
        "max_new_tokens": max_new_tokens, "sampling": asdict(sampling), "runtime": asdict(runtime),
    }  # fmt: skip
    for line in findings(report, engine.target.tokenizer):
        print(line)
    if json_file is not None:
        write_json(json_file, report.as_json() | {"arguments": arguments, "machine": describe_machine(device)})
    print(json.dumps(report.as_json()))
    if report.verdict == FAIL:
        raise typer.Exit(1)

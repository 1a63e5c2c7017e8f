"""`paradraft audit`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.options import warn_ignored, without_chance, without_drafter
from paradraft.engine import load_engine
from paradraft.files import check_outputs
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.speculation import Speculation


def audit(
    context: typer.Context,
    target: options.Target,
    drafter: options.Drafter,
    draft: options.Draft = None,
    k: options.K = 8,
    prompts: options.Prompts = None,
    num_prompts: options.NumPrompts = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Answers per prompt, when sampling.")] = 4,
    max_new_tokens: options.NewTokens = 64,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = 0,
    verify: options.Verify = "match",
    tree_budget: options.TreeBudget = None,
    tree_paths: options.TreePaths = None,
    lengths: options.Lengths = "fixed",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts answered together with the drafter; by default 4, or 1 if shape-invariant."),
    ] = None,
    shape_invariant: Annotated[
        bool, typer.Option("--shape-invariant", help="Let plain decoding run through passes as wide as the drafter's.")
    ] = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    compile: options.Compile = None,
    capacity: options.Capacity = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every finding to this file.")] = None,
) -> None:
    """Check that a drafter changes nothing.

    Compares tokens and logits with those of plain decoding, and logits with those of the model's own forward pass. With
    --verify rejection it tests the distribution instead of the tokens.

    Says PASS, PASS UP TO NUMERICAL TIES, FAIL or INCONCLUSIVE; the exit code of the last two is 1. The last line is
    JSON.
    """
    from paradraft.audit.audit import PASS, TIES, audit, findings
    from paradraft.bench.setup import held_out_prompts
    from paradraft.bench.summary import write_json
    from paradraft.environment import describe_machine

    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    tree = options.tree_of(tree_budget, tree_paths)
    speculation = Speculation(drafter=drafter, draft=draft, k=k, verify=verify, tree=tree, lengths=lengths)
    texts = held_out_prompts(num_prompts, prompts)
    if shape_invariant and batch_size not in (None, 1):
        raise ValueError(f"--shape-invariant --batch-size {batch_size}: a batch has another shape, leave its size out")
    batch_size = batch_size or (1 if shape_invariant else 4)
    check_outputs(json_file)
    runtime = Runtime(
        device=device, dtype=dtype, compiled=compile, capacity=capacity, width=speculation.pass_width,
        pad_to=1 + speculation.nodes if shape_invariant else 1,
    )  # fmt: skip
    engine = load_engine(target, speculation, runtime=runtime)
    warn_ignored(context, without_chance(sampling.is_greedy), without_drafter(drafter))
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
    if report.verdict not in (PASS, TIES):
        raise typer.Exit(1)

"""`paradraft audit`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from paradraft.cli import options
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.terminal import console
from paradraft.files import check_outputs
from paradraft.loader import load_engine
from paradraft.models.loading import settled
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.speculation import Speculation


@options.with_options
def audit(
    context: typer.Context,
    *,
    target: options.Target,
    speculation: Annotated[Speculation, options.Offer(defaults={"drafter": options.REQUIRED})],
    prompts: options.MeasuredPrompts = None,
    num_prompts: options.NumPrompts = 8,
    seeds: Annotated[
        int, typer.Option("--samples", "--seeds", min=1, help="Answers per prompt, each with a seed of its own.")
    ] = 4,
    max_new_tokens: options.NewTokens = 64,
    sampling: Annotated[Sampling, options.Offer(without=("logit_bias",))],
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts answered together with the drafter; by default 4, or 1 if shape-invariant."),
    ] = None,
    shape_invariant: Annotated[
        bool, typer.Option("--shape-invariant", help="Let plain decoding run through passes as wide as the drafter's.")
    ] = False,
    runtime: Runtime,
    placement: Annotated[Placement, options.Offer(without=("target_stages", "tensor_parallel"))],
    json_file: Annotated[Path | None, json_option("every finding")] = None,
) -> None:
    """Check that a drafter changes nothing.

    Compares tokens and logits with those of plain decoding, and logits with those of the model's own forward pass. With
    --verify rejection it tests the distribution instead of the tokens.

    Says PASS, PASS UP TO NUMERICAL TIES, FAIL or INCONCLUSIVE; the exit code of the last two is 1. The last line is
    JSON.
    """
    from paradraft.audit.audit import PASS, TIES, audit, check_may_be_lossless, findings
    from paradraft.bench.setup import held_out_prompts, source_of
    from paradraft.data.prompts import counted
    from paradraft.environment import describe_machine

    check_may_be_lossless(speculation.verify)
    texts = held_out_prompts(num_prompts, prompts, target)
    if shape_invariant and batch_size not in (None, 1):
        raise ValueError(f"--shape-invariant --batch-size {batch_size}: a batch has another shape, leave its size out")
    batch_size = batch_size or (1 if shape_invariant else 4)
    output = JsonOutput(json_file)
    check_outputs(output.file)
    pad_to = 1 + speculation.nodes if shape_invariant else 1
    runtime = replace(settled(runtime, target), width=speculation.pass_width, pad_to=pad_to)
    engine = load_engine(target, speculation, runtime=runtime, placement=placement)
    options.warn_ignored(
        context,
        options.without_chance(sampling.is_greedy),
        options.without_drafter(speculation),
        options.with_own_tree(speculation),
        options.with_gamma(speculation),
        options.without_process(placement),
    )
    with console(stderr=True).status("preparing") as status:
        report = audit(
            engine, texts, sampling=sampling, seeds=seeds, max_new_tokens=max_new_tokens, batch_size=batch_size,
            report=status.update,
        )  # fmt: skip
    source = source_of(prompts, target)
    arguments = {
        "target": target, **asdict(speculation), "prompts": source, "num_prompts": num_prompts, "seeds": seeds,
        "batch_size": batch_size, "max_new_tokens": max_new_tokens, "sampling": asdict(sampling),
        "runtime": asdict(runtime), "placement": asdict(placement),
    }  # fmt: skip
    for line in findings(report, engine.target.tokenizer):
        print(line)
    print(f"  asked: {counted(num_prompts, source) if prompts else f'{num_prompts} {source}'}")
    output.write(report.as_json() | {"arguments": arguments, "machine": describe_machine(runtime.device)})
    output.end_with(report.as_json())
    if report.verdict not in (PASS, TIES):
        raise typer.Exit(1)

"""`paradraft audit`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.sections import SERVERS
from paradraft.cli.terminal import console
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling

if TYPE_CHECKING:
    from paradraft.cli.commands.audit_served import AuditSettings

ONLY_SERVED = (
    "draft_folder", "model", "api_key_env", "vllm_python", "reference_endpoint", "reference_model",
    "reference_api_key_env",
)  # fmt: skip
"""Options of server audits only."""
ONLY_HERE = (
    *(name for name in options.OPTIONS[Speculation] if name != "k"), *options.OPTIONS[Placement],
    *(name for name in options.OPTIONS[Sampling] if name not in ("temperature", "seed")), "batch_size",
    "shape_invariant", "capacity", "compiled",
)  # fmt: skip
"""Options that do not apply to server audits."""


@options.with_options
def audit(
    context: typer.Context,
    draft_folder: Annotated[
        str | None,
        typer.Argument(metavar="[DRAFT]", help="With a server: what it drafts with, to compare how it drafts."),
    ] = None,
    *,
    target: options.Target,
    speculation: Annotated[Speculation, options.FIXED],
    endpoint: Annotated[
        str | None,
        typer.Option(rich_help_panel=SERVERS, help="Audit an OpenAI-compatible server: its address, up to /v1."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(rich_help_panel=SERVERS, help="With --endpoint: the model's name there.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(rich_help_panel=SERVERS, help="With --endpoint: send the key in this environment variable."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(rich_help_panel=SERVERS, help="Or start this engine with --target and DRAFT, and audit it: vllm."),
    ] = None,
    vllm_python: options.VllmPython = None,
    reference_endpoint: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SERVERS,
            help="With --endpoint: compare with this server instead of the target's weights here.",
        ),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(rich_help_panel=SERVERS, help="The model's name there; by default that of --model.")
    ] = (None),
    reference_api_key_env: Annotated[
        str | None, typer.Option(rich_help_panel=SERVERS, help="Send it the key in this environment variable.")
    ] = None,
    prompts: options.MeasuredPrompts = None,
    num_prompts: Annotated[int | None, options.num_prompts_option(options.FEW)] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--samples",
            "--seeds",
            min=0,
            help="Answers per prompt, each with a seed of its own; of a server beside a greedy one.",
        ),
    ] = 4,
    max_new_tokens: options.NewTokens = 64,
    sampling: Annotated[
        Sampling,
        options.Offer(without=("logit_bias",), helps={"temperature": "0 is greedy; a server's samples are then at 1."}),
    ],
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
    """Check that a drafter changes nothing, here or in a server that somebody else wrote.

    Here it compares tokens and logits with those of plain decoding, and logits with those of the model's own forward
    pass. With --verify rejection it tests the distribution instead of the tokens.

    With --endpoint or --engine it asks a server: its greedy tokens must be the likeliest of the target, its samples
    must have the target's distribution, and with DRAFT it must draft as the draft does here; where not, the likely
    cause is named.

    Says PASS, PASS UP TO NUMERICAL TIES, FAIL or INCONCLUSIVE; the exit code of the last two is 1. The last line is
    JSON.
    """
    with importing():
        from paradraft.audit.verdict import exit_code
        from paradraft.bench.setup import source_of
        from paradraft.cli.commands.audit_served import AuditSettings, ServerSettings, audit_served
        from paradraft.data.prompt_source import counted
        from paradraft.environment import describe_machine
        from paradraft.sources.loading import settled

    output = JsonOutput(json_file)
    check_outputs(output.file)
    common = AuditSettings(
        target=target, prompts=prompts, num_prompts=num_prompts, seeds=seeds, max_new_tokens=max_new_tokens,
        sampling=sampling, runtime=settled(runtime, target),
    )  # fmt: skip
    if endpoint is None and engine is None:
        _refuse(context, ONLY_SERVED, "is for the audit of a server: name one by --endpoint or --engine")
        lines, report, settings = _here(context, common, speculation, placement, batch_size, shape_invariant)
    else:
        _refuse(context, ONLY_HERE, "has no meaning in the audit of a server, which decides that itself")
        is_k_given = bool(options.given(context, ("k",)))
        server = ServerSettings(
            draft=draft_folder, k=speculation.k, is_k_given=is_k_given, endpoint=endpoint, model=model,
            api_key_env=api_key_env, engine=engine, vllm_python=vllm_python, reference_endpoint=reference_endpoint,
            reference_model=reference_model, reference_api_key_env=reference_api_key_env,
        )  # fmt: skip
        lines, report, settings = audit_served(common, server)
    source = source_of(prompts, target)
    for line in lines:
        print(line)
    arguments = asdict(common) | settings | {"prompts": source}
    count = arguments["num_prompts"]
    print(f"  asked: {counted(count, source) if prompts else f'{count} {source}'}")
    output.write(report | {"arguments": arguments, "machine": describe_machine(common.runtime.device)})
    output.end_with(report)
    if code := exit_code(report["verdict"]):
        raise typer.Exit(code)


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    if unused := options.given(context, names):
        raise ValueError(f"{unused[0]} {why}")


def _here(
    context: typer.Context,
    common: AuditSettings,
    speculation: Speculation,
    placement: Placement,
    batch_size: int | None,
    shape_invariant: bool,
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Audits this engine; returns the report as lines and as JSON, and the settings."""
    from paradraft.audit.audit import audit, check_may_be_lossless, findings
    from paradraft.bench.setup import held_out_prompts
    from paradraft.engine.loader import load_engine

    if not options.given(context, ("drafter",)):
        raise ValueError("--drafter: name the drafter to audit, or a server by --endpoint or --engine")
    if not common.seeds:
        raise ValueError("--samples 0: only a server is asked greedily too, use at least 1")
    check_may_be_lossless(speculation.verify)
    texts = held_out_prompts(
        common.num_prompts, common.prompts, common.target, common.runtime.tokenizer, usual=options.FEW
    )
    if shape_invariant and batch_size not in (None, 1):
        raise ValueError(f"--shape-invariant --batch-size {batch_size}: a batch has another shape, leave its size out")
    batch_size = batch_size or (1 if shape_invariant else 4)
    pad_to = 1 + speculation.nodes if shape_invariant else 1
    runtime = replace(common.runtime, width=speculation.pass_width, pad_to=pad_to)
    engine = load_engine(common.target, speculation, runtime=runtime, placement=placement)
    options.warn_ignored(
        context,
        options.without_chance(common.sampling.is_greedy),
        options.without_drafter(speculation),
        options.with_own_tree(speculation),
        options.with_gamma(speculation),
        options.without_process(placement),
    )
    with console(stderr=True).status("preparing") as status:
        report = audit(
            engine, texts, sampling=common.sampling, seeds=common.seeds, max_new_tokens=common.max_new_tokens,
            batch_size=batch_size, report=status.update,
        )  # fmt: skip
    settings = {
        **asdict(speculation), "num_prompts": len(texts), "batch_size": batch_size, "runtime": asdict(runtime),
        "placement": asdict(placement),
    }  # fmt: skip
    return findings(report, engine.target.tokenizer), report.as_json(), settings

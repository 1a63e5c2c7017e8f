"""`paradraft audit`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.ignored import given, of_drafting, refuse, warn_ignored, without_chance
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.options import OPTIONS, Offer, option, with_options
from paradraft.cli.sections import SERVERS
from paradraft.cli.terminal import console
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling

ONLY_SERVED = (
    "draft_folder", "model", "api_key_env", "vllm_python", "reference_endpoint", "reference_model",
    "reference_api_key_env",
)  # fmt: skip
"""Options of server audits only."""
ONLY_HERE = (
    *(name for name in OPTIONS[Speculation] if name != "k"), *OPTIONS[Placement],
    *(name for name in OPTIONS[Sampling] if name not in ("temperature", "seed")), "batch_size",
    "shape_invariant", "capacity", "compiled",
)  # fmt: skip
"""Options that do not apply to server audits."""
RECORDED = ("target", "prompts", "num_prompts", "seeds", "max_new_tokens", "sampling", "runtime")
"""Options of both audits in their JSON."""


@dataclass(frozen=True, kw_only=True)
class AuditArgs:
    """Options of `paradraft audit`."""

    draft_folder: Annotated[
        str | None,
        typer.Argument(metavar="[DRAFT]", help="With a server: what it drafts with, to compare how it drafts."),
    ] = None
    target: options.Target
    speculation: Annotated[Speculation, options.FIXED]
    endpoint: Annotated[
        str | None, option("Audit an OpenAI-compatible server: its address, up to /v1.", section=SERVERS)
    ] = None
    model: Annotated[str | None, option("With --endpoint: the model's name there.", section=SERVERS)] = None
    api_key_env: Annotated[
        str | None, option("With --endpoint: send the key in this environment variable.", section=SERVERS)
    ] = None
    engine: Annotated[
        str | None, option("Or start this engine with --target and DRAFT, and audit it: vllm.", section=SERVERS)
    ] = None
    vllm_python: options.VllmPython = None
    reference_endpoint: Annotated[
        str | None,
        option("With --endpoint: compare with this server instead of the target's weights here.", section=SERVERS),
    ] = None
    reference_model: Annotated[
        str | None, option("The model's name there; by default that of --model.", section=SERVERS)
    ] = None
    reference_api_key_env: Annotated[
        str | None, option("Send it the key in this environment variable.", section=SERVERS)
    ] = None
    prompts: options.MeasuredPrompts = None
    num_prompts: Annotated[int | None, options.num_prompts_option(options.FEW)] = None
    seeds: Annotated[
        int,
        option(
            "Answers per prompt, each with another seed; from a server, besides the greedy answer.",
            "--samples", "--seeds", least=0,
        ),
    ] = 4  # fmt: skip
    max_new_tokens: options.NewTokens = 64
    sampling: Annotated[
        Sampling,
        Offer(without=("logit_bias",), helps={"temperature": "0 is greedy; a server's samples are then at 1."}),
    ]
    batch_size: Annotated[
        int | None,
        option("Prompts answered together with the drafter; by default 4, or 1 if shape-invariant.", least=1),
    ] = None
    shape_invariant: Annotated[
        bool, option("Let plain decoding run through passes as wide as the drafter's.", "--shape-invariant")
    ] = False
    runtime: Runtime
    placement: Annotated[Placement, Offer(without=("target_stages", "tensor_parallel"))]
    json_file: Annotated[Path | None, json_option("every finding")] = None


@with_options
def audit(context: typer.Context, *, args: AuditArgs) -> None:
    """Check that a drafter changes nothing, here or in a server that somebody else wrote.

    Here it compares tokens and logits with those of plain decoding, and logits with those of the model's own forward
    pass. With --verify rejection or block it tests the distribution instead of the tokens.

    With --endpoint or --engine it asks a server: its greedy tokens must be the likeliest of the target, its samples
    must have the target's distribution, and with DRAFT it must draft as the draft does here; where not, the likely
    cause is named.

    Says PASS, PASS UP TO NUMERICAL TIES, FAIL or INCONCLUSIVE; the exit code of the last two is 1. The last line is
    JSON.
    """
    with importing():
        from paradraft.audit.verdict import exit_code
        from paradraft.bench.setup import source_of
        from paradraft.cli.commands.audit_served import audit_served
        from paradraft.data.prompt_source import counted
        from paradraft.environment import describe_machine
        from paradraft.sources.load_plan import plan_of

    output = JsonOutput(args.json_file)
    check_outputs(output.file)
    args = replace(args, runtime=plan_of(args.target, args.runtime).runtime)
    if args.endpoint is None and args.engine is None:
        refuse(context, ONLY_SERVED, "is for the audit of a server: name one by --endpoint or --engine")
        if not given(context, ("drafter",)):
            raise ValueError("--drafter: name the drafter to audit, or a server by --endpoint or --engine")
        lines, report, settings = _here(context, args)
    else:
        refuse(context, ONLY_HERE, "has no meaning in the audit of a server, which decides that itself")
        lines, report, settings = audit_served(args, is_k_given=bool(given(context, ("k",))))
    for line in lines:
        print(line)
    source = source_of(args.prompts, args.target)
    values = asdict(args)
    arguments = {name: values[name] for name in RECORDED} | settings | {"prompts": source}
    count = arguments["num_prompts"]
    print(f"  asked: {counted(count, source) if args.prompts else f'{count} {source}'}")
    output.write(report | {"arguments": arguments, "machine": describe_machine(args.runtime.device)})
    output.end_with(report)
    if code := exit_code(report["verdict"]):
        raise typer.Exit(code)


def _here(context: typer.Context, args: AuditArgs) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Audits this engine; returns the report as lines and as JSON, and the settings."""
    from paradraft.audit.audit import audit, check_may_be_lossless, findings
    from paradraft.bench.setup import held_out_prompts
    from paradraft.engine.loader import load_as_planned, plan_engine

    speculation, placement, batch_size = args.speculation, args.placement, args.batch_size
    if not args.seeds:
        raise ValueError("--samples 0: only a server is asked greedily too, use at least 1")
    check_may_be_lossless(speculation.verify)
    texts = held_out_prompts(args.num_prompts, args.prompts, args.target, args.runtime.tokenizer, usual=options.FEW)
    if args.shape_invariant and batch_size not in (None, 1):
        raise ValueError(f"--shape-invariant --batch-size {batch_size}: a batch has another shape, leave its size out")
    batch_size = batch_size or (1 if args.shape_invariant else 4)
    runtime = replace(args.runtime, pad_to=1 + speculation.nodes if args.shape_invariant else 1)
    plan = plan_engine(args.target, speculation, runtime, placement)
    engine = load_as_planned(plan, speculation)
    warn_ignored(context, without_chance(args.sampling.is_greedy), *of_drafting(speculation, placement))
    with console(stderr=True).status("preparing") as status:
        report = audit(
            engine, texts, sampling=args.sampling, seeds=args.seeds, max_new_tokens=args.max_new_tokens,
            batch_size=batch_size, report=status.update,
        )  # fmt: skip
    settings = {
        **asdict(speculation), "num_prompts": len(texts), "batch_size": batch_size, "runtime": asdict(plan.runtime),
        "placement": asdict(placement),
    }  # fmt: skip
    return findings(report, engine.target.tokenizer), report.as_json(), settings

"""`paradraft plan`."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.terminal import console, news
from paradraft.drafters import drafter_class
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.names import POCKET, short_name
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.verify import warning_of
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.plan.sizes import SizeTask

MOST = 4096
"""Largest value in a list of lengths, budgets or batch sizes."""
BATCH_SIZES = (1, 2, 4, 8, 16)
FROM_REPORT = ("num_prompts", "max_new_tokens", "temperature", "top_k", "top_p", "seed")
"""Options whose values an acceptance file already has."""


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """Parses comma-separated whole numbers and ranges a-b, at least 1; sorted, without duplicates.

    >>> numbers_of("--k", "8,1-3,2")
    (1, 2, 3, 8)
    """
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= MOST):
            raise ValueError(
                f"{option} {text}: use whole numbers from 1 to {MOST} with commas between them; 1-8 is all from 1 to 8"
            )
        numbers |= set(range(int(first), int(last) + 1))
    return tuple(sorted(numbers))


@options.with_options
def plan(
    context: typer.Context,
    *,
    target: options.Target,
    speculation: Annotated[
        Speculation,
        options.Offer(without=("k", "tree_budget", "tree_paths", "lengths", "gamma"), defaults={"drafter": "pard"}),
    ],
    acceptance: Annotated[
        Path | None,
        typer.Option(help="What `paradraft bench --json` wrote; by default the acceptance is measured first."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            "--k",
            callback=options.checked(partial(numbers_of, "--k")),
            help="Lengths of chains, such as 1-12 or 2,4,8. By default all that the acceptance file tells of.",
        ),
    ] = None,
    tree_budgets: Annotated[
        str | None,
        typer.Option(
            "--tree-budget",
            "--tree-budgets",
            callback=options.checked(partial(numbers_of, "--tree-budget")),
            help="Budgets of trees, such as 8,16. By default those in the acceptance file. Of ppd, sizes of passes.",
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            "--batch-size",
            callback=options.checked(partial(numbers_of, "--batch-size")),
            help="Prompts answered together; several sizes with commas between them, which divide the number of "
            "prompts. By default those of 1, 2, 4, 8 and 16 that do.",
        ),
    ] = None,
    prompts: options.MeasuredPrompts = None,
    num_prompts: Annotated[int | None, options.num_prompts_option(16)] = None,
    max_new_tokens: options.NewTokens = 128,
    sampling: Annotated[Sampling, options.Offer(without=("min_p", *options.PENALTIES))],
    check: Annotated[
        bool, typer.Option("--check", help="Measure what was chosen too, and say how far off it is.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="How often --check measures.")] = 2,
    runtime: Annotated[Runtime, options.COMPILED],
    threads: options.Threads = None,
    json_file: Annotated[Path | None, json_option("costs and predictions")] = None,
    plot_file: options.Plot = None,
) -> None:
    """Choose how many tokens to draft at each batch size. The last line of the output is JSON."""
    with importing():
        from paradraft.bench.report.summary import marked
        from paradraft.bench.result_file import read_result_file
        from paradraft.bench.setup import held_out_prompts, source_of
        from paradraft.data.prompt_source import counted
        from paradraft.drafters.ppd import PpdDrafter
        from paradraft.export.engines import lines
        from paradraft.plan.acceptance import PARTS, arguments_of
        from paradraft.plan.plan import DRAFT, run_plan
        from paradraft.plan.report import plot, table
        from paradraft.plan.sizes import SIZES, SizeTask
        from paradraft.plan.steadiness import unsteady_plan
        from paradraft.plan.task import PlanTask, doubts, known_of, ways_of
        from paradraft.sources.loading import settled

    measured = None if acceptance is None else (read_result_file(acceptance, PARTS), acceptance.name)
    if measured is not None:
        workload = arguments_of(*measured)
        sampling, max_new_tokens, num_prompts = workload.sampling, workload.max_new_tokens, workload.num_prompts
    options.use_threads(threads)
    texts = held_out_prompts(num_prompts, prompts, target, runtime.tokenizer)
    runtime = settled(runtime, target)
    output = JsonOutput(json_file)
    check_outputs(output.file, plot_file)
    options.check_png(plot_file)
    budgets = None if tree_budgets is None else numbers_of("--tree-budget", tree_budgets)
    if issubclass(drafter_class(speculation.drafter), PpdDrafter):
        unusable = {"--acceptance": acceptance, "--k": k, "--batch-size": batch_sizes, "--plot": plot_file}
        for option, value in unusable.items():
            if value is not None:
                raise ValueError(f"{option}: ppd is planned by the size of its passes at batch 1, leave it out")
        options.warn_ignored(
            context, options.without_chance(sampling.is_greedy), (not check, "without --check", ("runs",))
        )
        return _plan_sizes(
            SizeTask(
                target=target, speculation=speculation, sizes=budgets or SIZES, prompts=texts,
                max_new_tokens=max_new_tokens, sampling=sampling, source=source_of(prompts, target),
            ),
            runtime, check_runs=runs if check else 0, output=output,
        )  # fmt: skip
    sizes = BATCH_SIZES if batch_sizes is None else numbers_of("--batch-size", batch_sizes)
    task = PlanTask(
        target=target, speculation=speculation,
        batches=tuple(size for size in sizes if batch_sizes is not None or len(texts) % size == 0),
        ks=None if k is None else numbers_of("--k", k),
        trees=budgets,
        prompts=texts, max_new_tokens=max_new_tokens, sampling=sampling, source=source_of(prompts, target),
    )  # fmt: skip
    known = None if measured is None else known_of(task, *measured, runtime.dtype)
    for doubt in () if measured is None or known is None else doubts(task, known, *measured):
        print(f"warning: {doubt}", file=sys.stderr)
    ways = list(known or ways_of(task))
    runtime = replace(runtime, width=max(task.speculate(way).pass_width for way in ways))
    options.warn_ignored(
        context,
        (measured is not None, "with --acceptance, whose answers it is about", FROM_REPORT),
        options.without_chance(sampling.is_greedy and measured is None),
        (not check, "without --check", ("runs",)),
    )
    with news(console(stderr=True), "preparing") as report:
        result = run_plan(
            task, runtime, known=known, source=None if measured is None else measured[1],
            check_runs=runs if check else 0, report=report,
        )  # fmt: skip
    chance = "greedy" if sampling.is_greedy else f"temperature {sampling.temperature:g}"
    questions = f"{counted(len(texts), task.source)} × {number_of(max_new_tokens, 'token')}"
    title = f"{short_name(target)} with {speculation.drafter}, {questions}, {chance}"
    if measured is not None:
        title = marked(title, measured[0]["arguments"])
    console().print(table(result, title))
    if (unsteady := unsteady_plan(result)) is not None:
        print(unsteady)
    print("\n".join(lines(result["chains"], speculation.drafter, speculation.draft or DRAFT)))
    output.write(result)
    if plot_file is not None:
        plot(result, title, plot_file)
    output.end_with({key: result[key] for key in ("chosen", "chains", "vllm", "tensorrt_llm")})


def _plan_sizes(task: SizeTask, runtime: Runtime, *, check_runs: int, output: JsonOutput) -> None:
    """Plans PPD, whose prompt tokens are part of the target's pass, and writes the plan beside the checkpoint."""
    from paradraft.data.prompt_source import counted
    from paradraft.drafters.ppd import PLANS, Plan, read_plans, write_plan
    from paradraft.plan.sizes import run_size_plan, table
    from paradraft.plan.steadiness import unsteady_plan
    from paradraft.sources.loading import locate

    speculation = task.speculation
    speculation.check_models(task.target)
    draft = locate(speculation.draft or POCKET, "ppd")
    is_written = speculation.draft is not None and Path(draft).is_dir()
    if is_written:
        check_outputs(Path(draft) / PLANS, output.file)
        read_plans(draft)  # an unreadable file is an error now, not after the measurement
    with news(console(stderr=True), "preparing") as report:
        result = run_size_plan(task, runtime, check_runs=check_runs, report=report)
    chance = "greedy" if task.sampling.is_greedy else f"temperature {task.sampling.temperature:g}"
    prompts = f"{counted(len(task.prompts), task.source)} × {number_of(task.max_new_tokens, 'token')}"
    title = f"{short_name(task.target)} with {speculation.drafter}, {prompts}"
    lossy = ", not lossless" if warning_of(speculation.verify) else ""
    console().print(table(result, f"{title}, {chance}{lossy}"))
    if (unsteady := unsteady_plan(result)) is not None:
        print(unsteady)
    if result["speedup"] < 1:
        print(f"no size pays: the best is {result['speedup']:.2f}x plain decoding here")
    memory = result["memory_bytes"]
    print(
        f"prompt tokens: {memory['prompt_tokens']:,} bytes, {memory['prompt_tokens'] / memory['model']:.4%} of the "
        f"model; a pass of {result['chosen']} nodes: {memory['keys_and_values'] / 1e3:,.0f} kB of keys and values "
        f"and {memory['activations'] / 1e3:,.0f} kB of activations"
    )
    if (checked := result["checked"]) is not None:
        print(
            f"measured on the other prompts: {checked['tokens_per_pass']:.2f} tokens a pass "
            f"({checked['length_error']:+.0%} predicted), {checked['speedup']:.2f}x ({checked['speedup_error']:+.0%})"
        )
    output.write(result)
    if is_written:
        print(f"plan written to {write_plan(draft, Plan(**result['plan']))}")
    else:
        print(f"give the size with the drafter: --drafter ppd:size={result['chosen']}")
    summary = ("chosen", "speedup", "lossless", "plan", "checked")
    output.end_with({key: result[key] for key in summary})

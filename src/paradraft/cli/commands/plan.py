"""`paradraft plan`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.ignored import warn_ignored, without_chance
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.options import Offer, option, with_options
from paradraft.cli.terminal import console, news
from paradraft.cli.values import check_png, use_threads
from paradraft.drafters import drafter_class
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.names import POCKET, short_name
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.verify import warning_of
from paradraft.wording import number_of

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


@dataclass(frozen=True, kw_only=True)
class PlanArgs:
    """Options of `paradraft plan`."""

    target: options.Target
    speculation: Annotated[
        Speculation, Offer(without=("k", "tree_budget", "tree_paths", "lengths", "gamma"), defaults={"drafter": "pard"})
    ]
    acceptance: Annotated[
        Path | None, option("What `paradraft bench --json` wrote; by default the acceptance is measured first.")
    ] = None
    k: Annotated[
        str | None,
        option(
            "Lengths of chains, such as 1-12 or 2,4,8. By default all that the acceptance file tells of.",
            "-k", "--k", check=partial(numbers_of, "--k"),
        ),
    ] = None  # fmt: skip
    tree_budgets: Annotated[
        str | None,
        option(
            "Budgets of trees, such as 8,16. By default those in the acceptance file. Of ppd, sizes of passes.",
            "--tree-budget", "--tree-budgets", check=partial(numbers_of, "--tree-budget"),
        ),
    ] = None  # fmt: skip
    batch_sizes: Annotated[
        str | None,
        option(
            "Prompts answered together; several sizes with commas between them, which divide the number of prompts. By "
            "default those of 1, 2, 4, 8 and 16 that do.",
            "--batch-size", check=partial(numbers_of, "--batch-size"),
        ),
    ] = None  # fmt: skip
    prompts: options.MeasuredPrompts = None
    num_prompts: Annotated[int | None, options.num_prompts_option(16)] = None
    max_new_tokens: options.NewTokens = 128
    sampling: Annotated[Sampling, Offer(without=("min_p", *options.PENALTIES))]
    check: Annotated[bool, option("Measure what was chosen too, and say how far off it is.", "--check")] = False
    runs: Annotated[int, option("How often --check measures.", least=1)] = 2
    runtime: Annotated[Runtime, options.COMPILED]
    threads: options.Threads = None
    json_file: Annotated[Path | None, json_option("costs and predictions")] = None
    plot_file: options.Plot = None

    @property
    def check_runs(self) -> int:
        """Runs of the check; 0 for none."""
        return self.runs if self.check else 0

    @property
    def budgets(self) -> tuple[int, ...] | None:
        """Parsed budgets of trees."""
        return None if self.tree_budgets is None else numbers_of("--tree-budget", self.tree_budgets)

    def batches(self, prompts: int) -> tuple[int, ...]:
        """Batch sizes; the default ones that divide the number of prompts."""
        if self.batch_sizes is not None:
            return numbers_of("--batch-size", self.batch_sizes)
        return tuple(size for size in BATCH_SIZES if prompts % size == 0)

    def title(self, prompts: int, source: str | None) -> str:
        """Models, prompts and sampling, for the table."""
        from paradraft.data.prompt_source import counted

        chance = "greedy" if self.sampling.is_greedy else f"temperature {self.sampling.temperature:g}"
        questions = f"{counted(prompts, source)} × {number_of(self.max_new_tokens, 'token')}"
        return f"{short_name(self.target)} with {self.speculation.drafter}, {questions}, {chance}"


@with_options
def plan(context: typer.Context, *, args: PlanArgs) -> None:
    """Choose how many tokens to draft at each batch size. The last line of the output is JSON."""
    with importing():
        from paradraft.bench.result_file import read_result_file
        from paradraft.bench.setup import held_out_prompts
        from paradraft.drafters.ppd import PpdDrafter
        from paradraft.plan.acceptance import PARTS, arguments_of
        from paradraft.sources.load_plan import plan_of

    measured = None if args.acceptance is None else (read_result_file(args.acceptance, PARTS), args.acceptance.name)
    if measured is not None:
        of = arguments_of(*measured)
        args = replace(args, sampling=of.sampling, max_new_tokens=of.max_new_tokens, num_prompts=of.num_prompts)
    use_threads(args.threads)
    prompts = held_out_prompts(args.num_prompts, args.prompts, args.target, args.runtime.tokenizer)
    args = replace(args, runtime=plan_of(args.target, args.runtime).runtime)
    output = JsonOutput(args.json_file)
    check_outputs(output.file, args.plot_file)
    check_png(args.plot_file)
    if issubclass(drafter_class(args.speculation.drafter), PpdDrafter):
        _plan_sizes(context, args, prompts, output)
    else:
        _plan_lengths(context, args, prompts, measured, output)


def _plan_lengths(
    context: typer.Context,
    args: PlanArgs,
    prompts: list[str],
    measured: tuple[dict[str, Any], str] | None,
    output: JsonOutput,
) -> None:
    """Plans the lengths of chains and budgets of trees; `measured` is an acceptance file and its name."""
    from paradraft.bench.report.summary import marked
    from paradraft.bench.setup import source_of
    from paradraft.export.engines import lines
    from paradraft.plan.plan import DRAFT, run_plan
    from paradraft.plan.report import break_even, plot, table
    from paradraft.plan.steadiness import unsteady_plan
    from paradraft.plan.task import PlanTask, doubts, known_of

    speculation, is_measured = args.speculation, measured is not None
    task = PlanTask(
        target=args.target, speculation=speculation, batches=args.batches(len(prompts)),
        ks=None if args.k is None else numbers_of("--k", args.k), trees=args.budgets, prompts=prompts,
        max_new_tokens=args.max_new_tokens, sampling=args.sampling, source=source_of(args.prompts, args.target),
    )  # fmt: skip
    known = None if measured is None else known_of(task, *measured, args.runtime.dtype)
    for doubt in () if measured is None or known is None else doubts(task, known, *measured):
        print(f"warning: {doubt}", file=sys.stderr)
    warn_ignored(
        context,
        (is_measured, "with --acceptance, whose answers it is about", FROM_REPORT),
        without_chance(args.sampling.is_greedy and not is_measured),
        (not args.check, "without --check", ("runs",)),
    )
    with news(console(stderr=True), "preparing") as report:
        result = run_plan(
            task, args.runtime, known=known, source=None if measured is None else measured[1],
            check_runs=args.check_runs, report=report,
        )  # fmt: skip
    title = args.title(len(prompts), task.source)
    if measured is not None:
        title = marked(title, measured[0]["arguments"])
    console().print(table(result, title))
    if (unsteady := unsteady_plan(result)) is not None:
        print(unsteady)
    print("\n".join(break_even(result)))
    print("\n".join(lines(result["chains"], speculation.drafter, speculation.draft or DRAFT)))
    output.write(result)
    if args.plot_file is not None:
        plot(result, title, args.plot_file)
    output.end_with({key: result[key] for key in ("chosen", "chains", "vllm", "tensorrt_llm")})


def _plan_sizes(context: typer.Context, args: PlanArgs, prompts: list[str], output: JsonOutput) -> None:
    """Plans PPD, whose prompt tokens are part of the target's pass, and writes the plan beside the checkpoint."""
    from paradraft.bench.setup import source_of
    from paradraft.drafters.ppd import PLANS, Plan, read_plans, write_plan
    from paradraft.plan.sizes import SIZES, SizeTask, run_size_plan, table
    from paradraft.plan.steadiness import unsteady_plan
    from paradraft.sources.loading import locate

    unusable = {
        "--acceptance": args.acceptance, "--k": args.k, "--batch-size": args.batch_sizes, "--plot": args.plot_file
    }  # fmt: skip
    for name, value in unusable.items():
        if value is not None:
            raise ValueError(f"{name}: ppd is planned by the size of its passes at batch 1, leave it out")
    warn_ignored(context, without_chance(args.sampling.is_greedy), (not args.check, "without --check", ("runs",)))
    speculation = args.speculation
    task = SizeTask(
        target=args.target, speculation=speculation, sizes=args.budgets or SIZES, prompts=prompts,
        max_new_tokens=args.max_new_tokens, sampling=args.sampling, source=source_of(args.prompts, args.target),
    )  # fmt: skip
    speculation.check_models(task.target)
    draft = locate(speculation.draft or POCKET, "ppd")
    is_written = speculation.draft is not None and Path(draft).is_dir()
    if is_written:
        check_outputs(Path(draft) / PLANS, output.file)
        read_plans(draft)  # an unreadable file is an error now, not after the measurement
    with news(console(stderr=True), "preparing") as report:
        result = run_size_plan(task, args.runtime, check_runs=args.check_runs, report=report)
    lossy = ", not lossless" if warning_of(speculation.verify) else ""
    console().print(table(result, args.title(len(prompts), task.source) + lossy))
    if (unsteady := unsteady_plan(result)) is not None:
        print(unsteady)
    print("\n".join(_size_notes(result)))
    output.write(result)
    if is_written:
        print(f"plan written to {write_plan(draft, Plan(**result['plan']))}")
    else:
        print(f"give the size with the drafter: --drafter ppd:size={result['chosen']}")
    output.end_with({key: result[key] for key in ("chosen", "speedup", "lossless", "plan", "checked")})


def _size_notes(result: dict[str, Any]) -> list[str]:
    """Memory, and the figures of the check, in words."""
    memory, checked = result["memory_bytes"], result["checked"]
    notes = [f"no size pays: the best is {result['speedup']:.2f}x plain decoding here"] * (result["speedup"] < 1)
    notes.append(
        f"prompt tokens: {memory['prompt_tokens']:,} bytes, {memory['prompt_tokens'] / memory['model']:.4%} of the "
        f"model; a pass of {result['chosen']} nodes: {memory['keys_and_values'] / 1e3:,.0f} kB of keys and values "
        f"and {memory['activations'] / 1e3:,.0f} kB of activations"
    )
    if checked is not None:
        notes.append(
            f"measured on the other prompts: {checked['tokens_per_pass']:.2f} tokens a pass "
            f"({checked['length_error']:+.0%} predicted), {checked['speedup']:.2f}x ({checked['speedup_error']:+.0%})"
        )
    return notes

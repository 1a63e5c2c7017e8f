"""`paradraft drafters`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.options import Offer, option, with_options
from paradraft.cli.terminal import console, news
from paradraft.cli.values import use_threads
from paradraft.drafters import drafter_names, part_names, takes_draft, traits_of
from paradraft.engine.speculation import AUTO, Speculation
from paradraft.files import check_outputs
from paradraft.models.names import is_shape, short_name
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling

if TYPE_CHECKING:
    from paradraft.bench.setup import Workload

NONE = "none"
EVERYDAY = Path(__file__).parents[2] / "bench" / "everyday.jsonl"
"""Questions, texts to change and code, six in all."""


@dataclass(frozen=True, kw_only=True)
class DraftersArgs:
    """Options of `paradraft drafters`."""

    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{options.TARGET}.")]
    speculation: Annotated[
        Speculation,
        Offer(without=("drafter", "verify", "tree_budget", "tree_paths", "lengths", "gamma")),
    ]
    prompts: Annotated[
        Path | None,
        option(
            'JSONL file with one {"prompt": …} or {"messages": […]} per line; - is the standard input. By default six '
            "everyday requests: questions, texts and code to change.",
            show_default=False,
        ),
    ] = None
    num_prompts: Annotated[int | None, options.num_prompts_option(6)] = None
    max_new_tokens: options.NewTokens = 64
    sampling: Annotated[Sampling, Offer(without=("min_p", *options.PENALTIES))]
    runs: Annotated[int, option("How often everything is repeated.", least=1)] = 1
    runtime: Annotated[Runtime, options.COMPILED]
    threads: options.Threads = None
    json_file: Annotated[Path | None, json_option("every raw number")] = None

    def __post_init__(self) -> None:
        if is_shape(self.target):
            raise ValueError(f"{self.target!r} reads no texts, so what drafts well for it means nothing: name a model")


@with_options
def drafters(*, args: DraftersArgs) -> None:
    """List the drafters that fit a target, with what each yields here. The last line of the output is JSON."""
    with importing():
        from paradraft.bench.report.summary import notes, table
        from paradraft.bench.run import run_benchmark
        from paradraft.bench.spec import Benchmark, Method
        from paradraft.sources.load_plan import plan_of

    methods, draft = measured_methods(args.target, args.speculation)
    use_threads(args.threads)
    output = JsonOutput(args.json_file)
    check_outputs(output.file)
    runtime = plan_of(args.target, args.runtime).runtime
    speculation = Speculation(draft=draft, k=args.speculation.k, lengths="expected")
    benchmark = Benchmark(
        target=args.target, methods=[Method.parse(spec, speculation, dtype=runtime.dtype) for spec in methods],
        sampling=args.sampling, runs=args.runs, runtime=runtime,
    )  # fmt: skip
    work = _workload(args)
    with news(console(stderr=True), "preparing") as report:
        (result,) = run_benchmark(benchmark, [work], report)
    console().print(table(result["methods"], f"{short_name(args.target)}, {work.count} requests"))
    print("\n".join(notes(result["methods"])))
    others = not_measured(methods)
    print("not measured:")
    for needs, names in others.items():
        print(f"  {', '.join(names)}: {needs}")
    output.write({**result, "not_measured": others})
    output.end_with(result["methods"])


def measured_methods(target: str, speculation: Speculation) -> tuple[list[str], str | None]:
    """Plain decoding, what "auto" takes, and the drafters that need nothing beside the target, with its table if it has
    one; and the draft model of what "auto" takes."""
    from paradraft.engine.automatic import automatic, both, without_model
    from paradraft.sources.recorded import recorded_for

    free = [name for name in drafter_names() if traits_of(name).estimates and not traits_of(name).needs_grammar]
    chosen = automatic(target, Speculation(drafter=AUTO, draft=speculation.draft, k=speculation.k))
    named = chosen.drafter if chosen.k == speculation.k else f"{chosen.drafter}:k={chosen.k}"
    methods = ["ar", named, without_model(target)[0], *free, both(recorded_for(target))]
    return list(dict.fromkeys(methods)), chosen.draft


def not_measured(methods: Collection[str]) -> dict[str, list[str]]:
    """The other drafters, by what has to be there before they draft for a model."""
    others = defaultdict[str, list[str]](list)
    measured = {name for method in methods for name in part_names(method)}
    for name in drafter_names():
        if name != NONE and name not in measured:
            others[needs_of(name)].append(name)
    return dict(others)


def needs_of(drafter: str) -> str:
    """What a drafter needs beside a target, for users."""
    from paradraft.train import trainee_names

    if traits_of(drafter).needs_grammar:
        return "for requests with a JSON schema, in paradraft serve"
    if not takes_draft(drafter):
        return "for fast wide passes, or a target trained for it; try paradraft bench --methods ar,NAME"
    if drafter in trainee_names():
        return "for a target that has one (--draft), or after paradraft train NAME RECIPE"
    tokens = "of any family" if traits_of(drafter).has_own_tokens else "that has the same tokens"
    return f"with a small model {tokens} (--draft)"


def _workload(args: DraftersArgs) -> Workload:
    """The requests, in the target's chat template if it has one."""
    from paradraft.bench.setup import ChatFormat, Workload, prompts_for
    from paradraft.sources.loading import locate, tokenizer_for

    has_template = bool(tokenizer_for(locate(args.target, "target"), args.runtime.tokenizer).chat_template)
    texts = prompts_for(
        args.target, args.num_prompts, tokens=0, file=args.prompts or EVERYDAY, tokenizer=args.runtime.tokenizer,
        chat=ChatFormat() if has_template else None,
    )  # fmt: skip
    return Workload.of(texts, args.max_new_tokens, str(args.prompts or EVERYDAY.name))

"""`paradraft bench`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.commands.report import print_methods
from paradraft.cli.ignored import warn_ignored, without_chance
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.options import OPTIONS, Offer, option, with_options
from paradraft.cli.sections import RESULTS
from paradraft.cli.terminal import console, news
from paradraft.cli.values import check_png, use_threads, variables_of
from paradraft.drafters import split_settings
from paradraft.engine.speculation import AUTO, Speculation
from paradraft.files import check_outputs
from paradraft.models.names import is_shape
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree

if TYPE_CHECKING:
    from paradraft.bench.setup import ChatFormat, Workload
    from paradraft.bench.spec import Benchmark
    from paradraft.bench.tasks import Questions


def batch_sizes_of(text: str) -> list[int]:
    """Parses comma-separated batch sizes; raises ValueError unless all are positive whole numbers."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batch-size {text}: use whole numbers of at least 1 with commas between them")
    return list(map(int, sizes))


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Options of `paradraft bench`."""

    target: Annotated[str, option(f"{options.TARGET}; or shape:NAME with random weights.")]
    methods: Annotated[
        str,
        option(
            "Comma-separated: ar (AR+), a drafter, auto (what generate takes), or a peer: hf (AR), hf-assisted, "
            "hf-prompt-lookup, vllm, vllm-draft, vllm-pard, vllm-ngram, vllm-medusa, vllm-eagle, llama-cpp, "
            "llama-cpp-draft; with settings after colons, as in pard:k=12. By default hf, ar, autoregressive, pard "
            "and ngram.",
            show_default=False,
        ),
    ] = "hf,ar,autoregressive,pard,ngram"
    num_prompts: Annotated[
        int | None,
        option(
            "How many of the prompts to use, from the first, or questions of each task, evenly spread; by default "
            "16 prompts, or 80 questions; all where there are fewer."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None, option("Most tokens of an answer; by default 128, or the task's.", least=1)
    ] = None
    prompts: options.MeasuredPrompts = None
    task: Annotated[
        str | None,
        option(
            "Ask the questions of humaneval, gsm8k, math500, mtbench or specbench; several with commas between "
            "them, and their mean."
        ),
    ] = None
    task_data: Annotated[
        list[str] | None,
        option(
            "A local copy of the task's data, JSONL or Parquet; NAME=FILE where there are several tasks; may be "
            "repeated. By default it comes from Hugging Face."
        ),
    ] = None
    chat: Annotated[
        bool,
        option("Ask prompts as in a chat, through the model's chat template. By default they are continued.", "--chat"),
    ] = False
    system: Annotated[str | None, option("With --chat or --task: the system prompt.")] = None
    chat_template_kwargs: options.TemplateVariables = None
    speculation: Annotated[Speculation, replace(options.FIXED, without=("drafter", "tree_paths", "gamma"))]
    sampling: Annotated[Sampling, Offer(without=("logit_bias",))]
    batch_sizes: Annotated[
        str,
        option(
            "Prompts answered together; several sizes with commas between them.", "--batch-size", check=batch_sizes_of
        ),
    ] = "1"
    runs: Annotated[int, option("How often everything is repeated.", least=1)] = 3
    runtime: Annotated[Runtime, options.COMPILED]
    threads: options.Threads = None
    prompt_tokens: Annotated[int, option("Tokens of a prompt, for a shape as the target.", least=1)] = 128
    synthetic_acceptance: Annotated[
        str | None,
        option(
            "Draw verdicts by these rates, one for each position, with commas between them, to time models that "
            "are not trained yet."
        ),
    ] = None
    profile: Annotated[bool, option("Say where the time of a round goes.", "--profile", section=RESULTS)] = False
    vllm_python: options.VllmPython = None
    llama_cpp_python: options.LlamaCppPython = None
    json_file: Annotated[Path | None, json_option("every raw number")] = None
    plot_file: options.Plot = None
    page_folder: Annotated[Path | None, option("Write an HTML page into this folder.", "--report", section=RESULTS)] = (
        None
    )

    @property
    def specs(self) -> list[tuple[str, Speculation]]:
        """Methods with their defaults, each at each batch size; a single size of 1 adds nothing to them."""
        specs = [self._named(spec.strip()) for spec in self.methods.split(",")]
        sizes = batch_sizes_of(self.batch_sizes)
        if sizes == [1]:
            return specs
        if any(":batch=" in spec for spec, _ in specs):
            raise ValueError(f"--batch-size {self.batch_sizes}: a method sets batch= itself; give one or the other")
        return [(f"{spec}:batch={size}", defaults) for size in sizes for spec, defaults in specs]

    def _named(self, spec: str) -> tuple[str, Speculation]:
        """A method, in place of "auto" what that is, with the lengths of `generate` in passes in C++ unless it names a
        policy; and the values of settings that it leaves out."""
        name, settings = split_settings(spec)
        if name != AUTO:
            return spec, self.speculation
        with importing():
            from paradraft.bench.spec import SETTINGS
            from paradraft.engine.automatic import automatic

        named = dict(each.partition("=")[::2] for each in settings)
        if unknown := sorted({*named} - {*SETTINGS}):
            raise ValueError(f"method {spec!r}: {unknown[0]!r} is no setting of auto: use {', '.join(SETTINGS)}")
        wanted: dict[str, Any] = {key: named[key] for key in ("draft", "verify") if key in named}
        wanted |= {"k": int(named["k"])} if named.get("k", "").isdigit() else {}
        wanted |= {"tree": Tree(budget=int(named["tree"]))} if named.get("tree", "").isdigit() else {}
        asked = replace(self.speculation, drafter=AUTO, **wanted)
        chosen = automatic(self.target, asked)
        if chosen.k != asked.k:
            named["k"] = str(chosen.k)
        own = named | ({} if "lengths" in named else {"lengths": "expected"})
        method = ":".join([chosen.drafter, *(f"{key}={value}" for key, value in own.items())])
        return method, replace(self.speculation, draft=chosen.draft)


@with_options
def bench(context: typer.Context, *, args: BenchArgs) -> None:
    """Compare methods on the same prompts, interleaved. For programs the last line of the output is JSON."""
    with importing():
        from paradraft.bench.report.page import check_folder, write_page
        from paradraft.bench.report.plot import plot
        from paradraft.bench.run import run_benchmark

    benchmark = _benchmark(args)
    output = JsonOutput(args.json_file)
    check_outputs(output.file, args.plot_file)
    check_folder(args.page_folder)
    check_png(args.plot_file)
    chat = _chat_format(args)
    questions = [] if args.task is None else _questions(args, args.task, benchmark.runtime)
    works = [each.work for each in questions] or [_workload(args, benchmark.runtime, chat)]
    benchmark, skipped = _installed(context, args, benchmark, questions)
    errors = console(stderr=True)
    with news(errors, "preparing") as report:
        measured = run_benchmark(benchmark, works, report)
    results = {work.name: {**result, "skipped": skipped} for work, result in zip(works, measured, strict=True)}
    if chat is not None:
        for result in results.values():
            result["arguments"]["chat"] = asdict(chat)
    for each in questions:
        results[each.task.name]["task"] = each.as_json()
    whole, summary = _show(results, errors)
    output.write(whole)
    if args.plot_file is not None:
        plot(whole, args.plot_file)
    if args.page_folder is not None:
        errors.print(f"report: {write_page(args.page_folder, whole)}")
    output.end_with(summary)


def _benchmark(args: BenchArgs) -> Benchmark:
    """The benchmark of all methods."""
    from paradraft.bench.spec import Benchmark, Method
    from paradraft.bench.synthetic import SyntheticAcceptance
    from paradraft.sources.load_plan import plan_of

    runtime, rates = plan_of(args.target, args.runtime).runtime, args.synthetic_acceptance
    methods = [Method.parse(spec, defaults, dtype=runtime.dtype) for spec, defaults in args.specs]
    use_threads(args.threads)
    return Benchmark(
        target=args.target, methods=methods, sampling=args.sampling, runs=args.runs, profiled=args.profile,
        acceptance=None if rates is None else SyntheticAcceptance.parse(rates),
        runtime=runtime, vllm_python=args.vllm_python, llama_cpp_python=args.llama_cpp_python,
    )  # fmt: skip


def _chat_format(args: BenchArgs) -> ChatFormat | None:
    """Form of prompts in a chat; None continues them, or asks a task."""
    from paradraft.bench.setup import ChatFormat

    if args.task is not None:
        return None
    variables = variables_of(args.chat_template_kwargs)
    return ChatFormat(system=args.system, variables=variables) if args.chat else None


def _workload(args: BenchArgs, runtime: Runtime, chat: ChatFormat | None) -> Workload:
    """The prompts of a run without `--task`."""
    from paradraft.bench.setup import Workload, prompts_for, source_of

    texts = prompts_for(
        args.target, args.num_prompts, tokens=args.prompt_tokens, file=args.prompts, tokenizer=runtime.tokenizer,
        chat=chat,
    )  # fmt: skip
    return Workload.of(texts, args.max_new_tokens or 128, source_of(args.prompts, args.target))


def _questions(args: BenchArgs, names: str, runtime: Runtime) -> list[Questions]:
    """Selects the questions of all tasks before weights are loaded; warns of questions that are left out."""
    from paradraft.bench.tasks import Questions, files_of, read_questions, tasks_of
    from paradraft.sources.loading import load_config, locate, room, tokenizer_for

    if args.prompts is not None:
        raise ValueError(f"--prompts {args.prompts}: --task {names} brings its prompts; give one or the other")
    if is_shape(args.target):
        raise ValueError(
            f"--task {names}: {args.target!r} reads no texts, its prompts are random: give --prompt-tokens"
        )
    if "," in names and (args.plot_file or args.page_folder):
        raise ValueError(f"--task {names}: --plot and --report show one task; name one, or use --json")
    tasks = tasks_of(names)
    files = files_of(tasks, args.task_data or ())
    folder = locate(args.target, "target")
    config, tokenizer = load_config(folder), tokenizer_for(folder, runtime.tokenizer)
    questions = [
        Questions.choose(
            task, read_questions(task, files.get(task.name)), args.num_prompts, max_new_tokens=args.max_new_tokens,
            tokenizer=tokenizer, system=args.system, capacity=room(config, runtime.capacity),
        )
        for task in tasks
    ]  # fmt: skip
    for warning in filter(None, (each.warning() for each in questions)):
        print(f"warning: {warning}", file=sys.stderr)
    return questions


def _installed(
    context: typer.Context, args: BenchArgs, benchmark: Benchmark, questions: list[Questions]
) -> tuple[Benchmark, dict[str, str]]:
    """Leaves out methods of engines that are not installed, with the reasons; warns of them and of unused options."""
    from paradraft.bench.baselines import is_llama_cpp, is_vllm
    from paradraft.bench.baselines.llama_cpp import without_llama_cpp
    from paradraft.bench.baselines.vllm import without_vllm
    from paradraft.bench.setup import PLAIN

    methods, is_task = benchmark.methods, args.task is not None
    used = frozenset[str]().union(*(method.left_out for method in methods))
    unused = [name for name in (*OPTIONS[Speculation], "dtype") if name.removesuffix("_budget") not in used]
    unused += ["vllm_python"] * (not any(is_vllm(method.name) for method in methods))
    unused += ["llama_cpp_python"] * (not any(is_llama_cpp(method.name) for method in methods))
    methods, skipped = without_vllm(methods, args.vllm_python)
    methods, also_skipped = without_llama_cpp(methods, args.llama_cpp_python)
    skipped |= also_skipped
    has_template = not questions or bool(questions[0].tokenizer.chat_template)
    warn_ignored(
        context,
        without_chance(args.sampling.is_greedy and benchmark.acceptance is None),
        (True, "on any of these methods", unused),
        (not is_shape(args.target), "on a model with texts", ("prompt_tokens",)),
        (all(method.name in PLAIN for method in methods), "on methods that draft nothing", ("synthetic_acceptance",)),
        (not is_task, "without --task", ("task_data",)),
        (not is_task and not args.chat, "without --chat or --task", ("system", "chat_template_kwargs")),
        (is_task, "with --task, whose questions are asked in a chat", ("chat", "chat_template_kwargs")),
        (not has_template, "on a target without a chat template", ("system",)),
    )
    for spec, why in skipped.items():
        print(f"warning: {spec} is skipped. {why}", file=sys.stderr)
    return replace(benchmark, methods=methods), skipped


def _show(results: dict[str, dict[str, Any]], errors: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prints the results, with notes on `errors`; returns the JSON file's content and the summary."""
    from paradraft.bench.hardware.profile import profile_table
    from paradraft.bench.labels import labels
    from paradraft.bench.report.summary import title_of

    titled = {name: {"title": title_of(result), **result} for name, result in results.items()}
    for result in titled.values():
        title, methods = result["title"], result["methods"]
        print_methods(methods, title)
        if result["arguments"]["runtime"]["compiled"] is not False:
            shown = labels(methods)
            first = "; ".join(f"{shown[spec]}: {figures['warm_up_s']:.0f} s" for spec, figures in methods.items())
            errors.print(f"first answers, with what had to be compiled: {first}")
        if "profile" in result:
            console().print(profile_table(result["profile"], f"where a round's time goes: {title}", labels(methods)))
    return report_mean(titled) if len(titled) > 1 else (result, methods)


def report_mean(results: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prints the mean over tasks; returns the JSON file's content (title, tasks, mean) and the summaries."""
    from paradraft.bench.report.summary import marked, mean_of, mean_table

    arguments = next(iter(results.values()))["arguments"]
    title = marked(f"{', '.join(results)}: {arguments['target']}", arguments)
    summaries = {name: result["methods"] for name, result in results.items()}
    mean = mean_of(summaries)
    console().print(mean_table(summaries, mean, title))
    return {"title": title, "tasks": results, "mean": mean}, {**summaries, "mean": mean}

"""`paradraft bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.json_output import JsonOutput, json_option
from paradraft.cli.sections import RESULTS
from paradraft.cli.terminal import console, news
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.names import is_shape
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling

if TYPE_CHECKING:
    from paradraft.bench.spec import Method
    from paradraft.bench.tasks import Questions


def check_alone(names: str, target: str, prompts: Path | None, *, drawn: Sequence[Path | None]) -> None:
    """Raises ValueError for options that conflict with `--task`; `drawn` are the outputs that show one task only."""
    if prompts is not None:
        raise ValueError(f"--prompts {prompts}: --task {names} has prompts of its own; give one or the other")
    if is_shape(target):
        raise ValueError(f"--task {names}: {target!r} reads no texts, its prompts are random: give --prompt-tokens")
    if "," in names and any(drawn):
        raise ValueError(f"--task {names}: --plot and --report show one task; name one, or use --json")


def questions_for(
    target: str,
    names: str,
    data: Sequence[str],
    *,
    num_questions: int | None,
    max_new_tokens: int | None,
    system: str | None,
    capacity: int | None,
    tokenizer: str | None,
) -> list[Questions]:
    """Selects the questions of all tasks before weights are loaded; warns of questions that are left out."""
    from paradraft.bench.tasks import Questions, files_of, read_questions, tasks_of
    from paradraft.sources.loading import load_config, locate, room, tokenizer_for

    tasks = tasks_of(names)
    files = files_of(tasks, data)
    folder = locate(target, "target")
    config, loaded_tokenizer = load_config(folder), tokenizer_for(folder, tokenizer)
    questions = [
        Questions.choose(
            task,
            read_questions(task, files.get(task.name)),
            num_questions,
            max_new_tokens=max_new_tokens,
            tokenizer=loaded_tokenizer,
            system=system,
            capacity=room(config, capacity),
        )
        for task in tasks
    ]
    for warning in filter(None, (each.warning() for each in questions)):
        print(f"warning: {warning}", file=sys.stderr)
    return questions


def report_mean(results: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prints the mean over tasks; returns the JSON file's content (title, tasks, mean) and the summaries."""
    from paradraft.bench.report.summary import marked, mean_of, mean_table

    arguments = next(iter(results.values()))["arguments"]
    title = marked(f"{', '.join(results)}: {arguments['target']}", arguments)
    summaries = {name: result["methods"] for name, result in results.items()}
    mean = mean_of(summaries)
    console().print(mean_table(summaries, mean, title))
    return {"title": title, "tasks": results, "mean": mean}, {**summaries, "mean": mean}


def batch_sizes_of(text: str) -> list[int]:
    """Parses comma-separated batch sizes; raises ValueError unless all are positive whole numbers."""
    sizes = [size.strip() for size in text.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batch-size {text}: use whole numbers of at least 1 with commas between them")
    return list(map(int, sizes))


@options.with_options
def bench(
    context: typer.Context,
    *,
    target: Annotated[str, typer.Option(help=f"{options.TARGET}; or shape:NAME with random weights.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: ar (AR+), a drafter, or a peer: hf (AR), hf-assisted, hf-prompt-lookup, vllm, "
            "vllm-draft, vllm-pard, vllm-ngram, vllm-medusa, vllm-eagle, llama-cpp, llama-cpp-draft; with settings "
            "after colons, as in pard:k=12. By default hf, ar, autoregressive, pard and ngram.",
            show_default=False,
        ),
    ] = "hf,ar,autoregressive,pard,ngram",
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="How many of the prompts to use, from the first, or questions of each task, evenly spread; by default "
            "16 prompts, or 80 questions; all where there are fewer.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer; by default 128, or the task's.")
    ] = None,
    prompts: options.MeasuredPrompts = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Ask the questions of humaneval, gsm8k, math500, mtbench or specbench; several with commas between "
            "them, and their mean."
        ),
    ] = None,
    task_data: Annotated[
        list[str] | None,
        typer.Option(
            help="A local copy of the task's data, JSONL or Parquet; NAME=FILE where there are several tasks; may be "
            "repeated. By default it comes from Hugging Face."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Ask prompts as in a chat, through the model's chat template. By default they are continued."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat or --task: what the model reads first.")] = None,
    chat_template_kwargs: options.TemplateVariables = None,
    speculation: Annotated[Speculation, replace(options.FIXED, without=("drafter", "tree_paths", "gamma"))],
    sampling: Annotated[Sampling, options.Offer(without=("logit_bias",))],
    batch_sizes: Annotated[
        str,
        typer.Option(
            "--batch-size",
            callback=options.checked(batch_sizes_of),
            help="Prompts answered together; several sizes with commas between them.",
        ),
    ] = "1",
    runs: Annotated[int, typer.Option(min=1, help="How often everything is repeated.")] = 3,
    runtime: Annotated[Runtime, options.COMPILED],
    threads: options.Threads = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, for a shape as the target.")] = 128,
    synthetic_acceptance: Annotated[
        str | None,
        typer.Option(
            help="Draw verdicts by these rates, one for each position, with commas between them, to time models that "
            "are not trained yet."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", rich_help_panel=RESULTS, help="Say where the time of a round goes.")
    ] = False,
    vllm_python: options.VllmPython = None,
    llama_cpp_python: options.LlamaCppPython = None,
    json_file: Annotated[Path | None, json_option("every raw number")] = None,
    plot_file: options.Plot = None,
    page_folder: Annotated[
        Path | None, typer.Option("--report", rich_help_panel=RESULTS, help="Write an HTML page into this folder.")
    ] = None,
) -> None:
    """Compare methods on the same prompts, interleaved. For programs the last line of the output is JSON."""
    with importing():
        from paradraft.bench.baselines import is_llama_cpp, is_vllm
        from paradraft.bench.baselines.llama_cpp import without_llama_cpp
        from paradraft.bench.baselines.vllm import without_vllm
        from paradraft.bench.report.page.page import check_folder, write_page
        from paradraft.bench.report.plot import plot
        from paradraft.bench.run import run_benchmark
        from paradraft.bench.setup import PLAIN, ChatFormat, Workload, prompts_for, source_of
        from paradraft.bench.spec import Benchmark, Method
        from paradraft.bench.synthetic import SyntheticAcceptance
        from paradraft.data.records import read_object
        from paradraft.sources.loading import settled

    runtime = settled(runtime, target)
    specs = _with_batches([spec.strip() for spec in methods.split(",")], batch_sizes)
    chosen = [Method.parse(spec, speculation, dtype=runtime.dtype) for spec in specs]
    runtime = replace(runtime, width=max(method.speculation.pass_width for method in chosen))
    options.use_threads(threads)
    acceptance = None if synthetic_acceptance is None else SyntheticAcceptance.parse(synthetic_acceptance)
    output = JsonOutput(json_file)
    check_outputs(output.file, plot_file)
    check_folder(page_folder)
    options.check_png(plot_file)
    questions: list[Questions] = []
    chat_settings: ChatFormat | None = None
    if task is None:
        variables = read_object(chat_template_kwargs or "{}", "--chat-template-kwargs", '{"enable_thinking": false}')
        chat_settings = ChatFormat(system=system, variables=variables) if chat else None
        texts = prompts_for(
            target, num_prompts, tokens=prompt_tokens, file=prompts, tokenizer=runtime.tokenizer, chat=chat_settings
        )
        works = [Workload.of(texts, max_new_tokens or 128, source_of(prompts, target))]
    else:
        check_alone(task, target, prompts, drawn=(plot_file, page_folder))
        questions = questions_for(
            target, task, task_data or (), num_questions=num_prompts, max_new_tokens=max_new_tokens, system=system,
            capacity=runtime.capacity, tokenizer=runtime.tokenizer,
        )  # fmt: skip
        works = [each.work for each in questions]
    unused = _unused(chosen)
    unused += ["vllm_python"] * (not any(is_vllm(method.name) for method in chosen))
    unused += ["llama_cpp_python"] * (not any(is_llama_cpp(method.name) for method in chosen))
    chosen, skipped = without_vllm(chosen, vllm_python)
    chosen, also_skipped = without_llama_cpp(chosen, llama_cpp_python)
    skipped |= also_skipped
    plain = all(method.name in PLAIN for method in chosen)
    options.warn_ignored(
        context,
        options.without_chance(sampling.is_greedy and acceptance is None),
        (True, "on any of these methods", unused),
        (not is_shape(target), "on a model with texts", ("prompt_tokens",)),
        (plain, "on methods that draft nothing", ("synthetic_acceptance",)),
        (task is None, "without --task", ("task_data",)),
        (task is None and not chat, "without --chat or --task", ("system", "chat_template_kwargs")),
        (task is not None, "with --task, whose questions are asked in a chat", ("chat", "chat_template_kwargs")),
        (
            bool(questions) and not questions[0].tokenizer.chat_template,
            "on a target without a chat template",
            ("system",),
        ),
    )
    for spec, why in skipped.items():
        print(f"warning: {spec} is skipped. {why}", file=sys.stderr)
    benchmark = Benchmark(
        target=target, methods=chosen, sampling=sampling, runs=runs, acceptance=acceptance, profiled=profile,
        runtime=runtime, vllm_python=vllm_python, llama_cpp_python=llama_cpp_python,
    )  # fmt: skip
    errors = console(stderr=True)
    with news(errors, "preparing") as report:
        measured = run_benchmark(benchmark, works, report)
    results = {work.name: {**result, "skipped": skipped} for work, result in zip(works, measured, strict=True)}
    if chat_settings is not None:
        for result in results.values():
            result["arguments"]["chat"] = asdict(chat_settings)
    for each in questions:
        results[each.task.name]["task"] = each.as_json()
    whole, summary = _show(results, errors)
    output.write(whole)
    if plot_file is not None:
        plot(whole, plot_file)
    if page_folder is not None:
        errors.print(f"report: {write_page(page_folder, whole)}")
    output.end_with(summary)


def _unused(chosen: list[Method]) -> list[str]:
    """Options for settings that every method leaves out or sets itself."""
    used = frozenset[str]().union(*(method.left_out for method in chosen))
    return [name for name in (*options.OPTIONS[Speculation], "dtype") if name.removesuffix("_budget") not in used]


def _show(results: dict[str, dict[str, Any]], errors: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prints the results, with notes on `errors`; returns the JSON file's content and the summary."""
    from paradraft.bench.hardware.profile import profile_table
    from paradraft.bench.labels import labels
    from paradraft.bench.report.summary import latency_table, notes, table, title_of

    titled = {name: {"title": title_of(result), **result} for name, result in results.items()}
    for result in titled.values():
        title, methods = result["title"], result["methods"]
        console().print(table(methods, title))
        print("\n".join(notes(methods)))
        if (latencies := latency_table(methods)) is not None:
            print()
            console().print(latencies)
        if result["arguments"]["runtime"]["compiled"] is not False:
            shown = labels(methods)
            first = "; ".join(f"{shown[spec]}: {figures['warm_up_s']:.0f} s" for spec, figures in methods.items())
            errors.print(f"first answers, with what had to be compiled: {first}")
        if "profile" in result:
            console().print(profile_table(result["profile"], f"where a round's time goes: {title}", labels(methods)))
    return report_mean(titled) if len(titled) > 1 else (result, methods)


def _with_batches(specs: list[str], sizes: str) -> list[str]:
    """Combines methods with batch sizes; a single size of 1 adds nothing to the specs."""
    batch_sizes = batch_sizes_of(sizes)
    if batch_sizes == [1]:
        return specs
    if any(":batch=" in spec for spec in specs):
        raise ValueError(f"--batch-size {sizes}: a method has a batch of its own; give one or the other")
    return [f"{spec}:batch={size}" for size in batch_sizes for spec in specs]

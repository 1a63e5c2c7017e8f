"""`paradraft regenerate`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import progress as bars
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.sections import SERVERS
from paradraft.cli.terminal import console
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.data.regenerate import RegenerationProgress

EVERY_S = 10.0
"""Seconds between two lines of progress without a terminal."""


@contextmanager
def shown(console: Console) -> Iterator[Callable[[RegenerationProgress], None]]:
    """Yields a progress callback: a bar on a terminal, else a line every `EVERY_S`."""
    if console.is_terminal and not console.is_dumb_terminal:
        with bars.Progress(bars.BarColumn(), bars.TextColumn("{task.description}"), console=console) as bar:
            task = bar.add_task("")
            yield lambda progress: bar.update(
                task, total=progress.total, completed=progress.total - progress.missing, description=line_of(progress)
            )
        return
    last_s = -math.inf

    def report(progress: RegenerationProgress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            console.print(line_of(progress), soft_wrap=True)

    yield report


def line_of(progress: RegenerationProgress) -> str:
    """Progress in words: done, speed, time left."""
    parts = [f"{progress.total - progress.missing}/{progress.total} answers"]
    elapsed_s = time.monotonic() - progress.started_s
    if progress.written and elapsed_s > 0:
        left_s = elapsed_s / progress.written * (progress.missing - len(progress.failed))
        parts += [f"{progress.tokens / elapsed_s:.0f} tokens/s", f"{timedelta(seconds=round(left_s))} left"]
    if progress.failed:
        parts.append(f"{len(progress.failed)} failed")
    return "  ".join(parts)


HERE = (*options.OPTIONS[Speculation], "batch_size", *options.OPTIONS[Runtime])
THERE = ("model", "concurrency", "retries", "timeout", "api_key_env", "request_fields")
"""Options of only --target (HERE) or only --endpoint (THERE)."""
SHOWN_FAILURES = 5


@options.with_options
def regenerate(
    context: typer.Context,
    *,
    prompts: Annotated[
        Path,
        typer.Option(
            help='JSONL, JSON or Parquet file or Hugging Face dataset (name, name:split) of {"prompt": …}, '
            '{"messages": […]}, {"conversations": […]}, {"conversation": […]} or {"user": …}; further keys are kept.'
        ),
    ],
    out: Annotated[Path, typer.Option(help="JSONL file of answers, as paradraft train reads them; it is added to.")],
    columns: Annotated[
        str | None,
        typer.Option(
            help='JSON object: what the prompts call prompt, messages or user, as in {"user": "instruction"}; other '
            "values are not kept."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Answer here: Hugging Face id, folder, or pocket (the shipped family).")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(rich_help_panel=SERVERS, help="Or ask an OpenAI-compatible server: its address, up to /v1."),
    ] = None,
    chat_template_kwargs: options.TemplateVariables = None,
    max_new_tokens: options.NewTokens = 256,
    sampling: Annotated[Sampling, options.Offer(without=options.PENALTIES)],
    samples: Annotated[int, typer.Option(help="Answers per prompt, each with a seed of its own.")] = 1,
    speculation: Annotated[
        Speculation,
        options.Offer(without=("verify", "tree_paths"), helps={"drafter": f"With --target: {options.DRAFTERS}"}),
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 8,
    runtime: Runtime,
    model: Annotated[
        str | None, typer.Option(rich_help_panel=SERVERS, help="With --endpoint: the model's name there.")
    ] = None,
    concurrency: Annotated[int, typer.Option(rich_help_panel=SERVERS, min=1, help="Most requests at a time.")] = 32,
    retries: Annotated[
        int,
        typer.Option(rich_help_panel=SERVERS, min=0, help="How often a request is sent again after a passing error."),
    ] = 5,
    timeout: Annotated[float, typer.Option(rich_help_panel=SERVERS, help="Most seconds of a request.")] = 600.0,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SERVERS, help="Send the key in this environment variable, such as OPENAI_API_KEY."
        ),
    ] = None,
    request_fields: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SERVERS,
            help="JSON object of further fields of each request, for settings that only this server knows.",
        ),
    ] = None,
) -> None:
    """Let the target answer prompts: what its drafter is trained on. Run the same command again to resume.

    Of a conversation every turn of the assistant is answered anew. The same seed gives the same answers,
    whatever the drafter, the batch size, or how often the run was stopped. If a prompt gets no answer, the
    exit code is 1, and the same command asks for it again.
    """
    with importing():
        from paradraft.data.questions import read_questions
        from paradraft.data.records import check_columns, read_object
        from paradraft.data.regenerate import Answerer, regenerate

    if (target is None) == (endpoint is None):
        raise ValueError("give either --target (a model to run here) or --endpoint (a server's address)")
    if unused := options.given(context, THERE if endpoint is None else HERE):
        source = "--target" if endpoint is None else "--endpoint"
        raise ValueError(f"{unused[0]} has no use with {source}: leave it out")
    if sampling.is_greedy and samples > 1:
        raise ValueError(f"--samples {samples} would give the same answer {samples} times: raise --temperature above 0")
    check_outputs(out)
    names = read_object(columns or "{}", "--columns", '{"user": "instruction"}')
    check_columns(names)
    questions = read_questions(prompts, samples, names)
    variables = read_object(chat_template_kwargs or "{}", "--chat-template-kwargs", '{"enable_thinking": false}')
    answerer: Answerer
    if target is not None:
        from paradraft.data.local import InProcess
        from paradraft.engine.loader import load_engine

        runtime = replace(runtime, width=speculation.pass_width)
        engine = load_engine(target, speculation, runtime=runtime)
        answerer = InProcess(
            engine=engine, target=target, sampling=sampling, max_new_tokens=max_new_tokens, batch_size=batch_size,
            chat_template_kwargs=variables,
        )  # fmt: skip
    else:
        from paradraft.data.endpoint import Endpoint

        assert endpoint is not None
        if model is None:
            raise ValueError("--endpoint needs --model: the name that the server knows the target by")
        answerer = Endpoint(
            url=endpoint, model=model, sampling=sampling, max_new_tokens=max_new_tokens, concurrency=concurrency,
            retries=retries, timeout_s=timeout, api_key=options.key_in(api_key_env),
            fields=read_object(request_fields or "{}", "--request-fields", '{"repetition_penalty": 1.05}'),
            chat_template_kwargs=variables,
        )  # fmt: skip
    asks_plainly = all("prompt" in question.record for question in questions)
    without_conversations = (asks_plainly, "without conversations", ("chat_template_kwargs",))
    options.warn_ignored(
        context,
        options.without_chance(sampling.is_greedy),
        options.without_drafter(speculation),
        options.with_own_tree(speculation),
        without_conversations,
    )
    errors = console(stderr=True)
    try:
        with shown(errors) as report:
            progress = regenerate(answerer, questions, out, report)
    except KeyboardInterrupt:
        errors.print(f"stopped; {out} keeps what was written, and the same command goes on from there", soft_wrap=True)
        raise
    _summarize(progress, out, errors)


def _summarize(progress: RegenerationProgress, out: Path, console: Console) -> None:
    for outcome in progress.failed[:SHOWN_FAILURES]:
        console.print(f"no answer to {outcome.question.place}: {outcome.failure}", soft_wrap=True)
    if progress.shortened:
        console.print(
            f"ended early, without room for another turn: {number_of(progress.shortened, 'conversation')}",
            soft_wrap=True,
        )
    answered = progress.total - progress.missing
    print(f"{answered} of {progress.total} answers are in {out}, {progress.written} of them new")
    if unasked := progress.missing - len(progress.failed):
        console.print(f"the endpoint seems to be down: {number_of(unasked, 'prompt')} not asked", soft_wrap=True)
    if progress.missing:
        console.print(f"{number_of(progress.missing, 'answer')} missing; the same command asks again", soft_wrap=True)
        raise typer.Exit(1)

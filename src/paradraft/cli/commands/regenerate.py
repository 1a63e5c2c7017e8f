"""`paradraft regenerate`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console

from paradraft.cli import options
from paradraft.cli.ignored import of_drafting, refuse, warn_ignored, without_chance
from paradraft.cli.importing import importing
from paradraft.cli.options import OPTIONS, Offer, option, with_options
from paradraft.cli.sections import SERVERS
from paradraft.cli.terminal import console, news
from paradraft.cli.values import key_in, variables_of
from paradraft.engine.speculation import Speculation
from paradraft.files import check_outputs
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.data.regenerate import Answerer, RegenerationProgress

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


HERE = (*OPTIONS[Speculation], "rounds", "batch_size", *OPTIONS[Runtime])
THERE = ("model", "concurrency", "retries", "timeout", "api_key_env", "request_fields")
"""Options of only --target (HERE) or only --endpoint (THERE)."""
SHOWN_FAILURES = 5


@dataclass(frozen=True, kw_only=True)
class RegenerateArgs:
    """Options of `paradraft regenerate`."""

    prompts: Annotated[
        Path | None,
        option(
            'JSONL, JSON or Parquet file or Hugging Face dataset (name, name:split) of {"prompt": …}, '
            '{"messages": […]}, {"conversations": […]}, {"conversation": […]} or {"user": …}; further keys are kept.',
            show_default=False,
        ),
    ] = None
    own_questions: Annotated[
        int | None,
        option(
            "Instead of --prompts, with --target: the model asks itself questions, until this many are in the file "
            "beside --out.",
            least=1,
            show_default=False,
        ),
    ] = None
    out: Annotated[Path, option("JSONL file of answers, as paradraft train reads them; it is added to.")]
    columns: Annotated[
        str | None,
        option(
            'JSON object: what the prompts call prompt, messages or user, as in {"user": "instruction"}; other '
            "values are not kept."
        ),
    ] = None
    target: Annotated[str | None, option("Answer here: Hugging Face id, folder, or pocket (the shipped family).")] = (
        None
    )
    endpoint: Annotated[
        str | None, option("Or ask an OpenAI-compatible server: its address, up to /v1.", section=SERVERS)
    ] = None
    chat_template_kwargs: options.TemplateVariables = None
    max_new_tokens: options.NewTokens = 256
    sampling: Annotated[Sampling, Offer(without=options.PENALTIES)]
    samples: Annotated[int, option("Answers per prompt, each with another seed.")] = 1
    speculation: Annotated[
        Speculation,
        Offer(without=("verify", "tree_paths"), helps={"drafter": f"With --target: {options.DRAFTERS}"}),
    ]
    rounds: options.Rounds = None
    batch_size: Annotated[int, option("Prompts answered together.", least=1)] = 8
    runtime: Runtime
    model: Annotated[str | None, option("With --endpoint: the model's name there.", section=SERVERS)] = None
    concurrency: Annotated[int, option("Most requests at a time.", section=SERVERS, least=1)] = 32
    retries: Annotated[
        int, option("How often a request is sent again after a passing error.", section=SERVERS, least=0)
    ] = 5
    timeout: Annotated[float, option("Most seconds of a request.", section=SERVERS)] = 600.0
    api_key_env: Annotated[
        str | None, option("Send the key in this environment variable, such as OPENAI_API_KEY.", section=SERVERS)
    ] = None
    request_fields: Annotated[
        str | None,
        option(
            "JSON object of further fields of each request, for settings that only this server knows.",
            section=SERVERS,
        ),
    ] = None

    def answerer(self, variables: dict[str, Any]) -> Answerer:
        """Loads the target, or prepares the requests to the endpoint."""
        sampling, limit = self.sampling, self.max_new_tokens
        if self.target is not None:
            from paradraft.data.local import InProcess
            from paradraft.engine.loader import load_engine

            engine = load_engine(self.target, self.speculation, runtime=self.runtime)
            if self.rounds is not None:
                engine.log_rounds(self.rounds)
            return InProcess(
                engine=engine, target=self.target, sampling=sampling, max_new_tokens=limit,
                batch_size=self.batch_size, chat_template_kwargs=variables,
            )  # fmt: skip
        from paradraft.data.endpoint import Endpoint
        from paradraft.sources.records import read_object

        assert self.endpoint is not None
        if self.model is None:
            raise ValueError("--endpoint needs --model: the name that the server knows the target by")
        return Endpoint(
            url=self.endpoint, model=self.model, sampling=sampling, max_new_tokens=limit,
            concurrency=self.concurrency, retries=self.retries, timeout_s=self.timeout,
            api_key=key_in(self.api_key_env),
            fields=read_object(self.request_fields or "{}", "--request-fields", '{"repetition_penalty": 1.05}'),
            chat_template_kwargs=variables,
        )  # fmt: skip


@with_options
def regenerate(context: typer.Context, *, args: RegenerateArgs) -> None:
    """Let the target answer prompts: what its drafter is trained on. Run the same command again to resume.

    Of a conversation every turn of the assistant is answered anew. The same seed gives the same answers,
    whatever the drafter, the batch size, or how often the run was stopped. If a prompt gets no answer, the
    exit code is 1, and the same command asks for it again.
    """
    with importing():
        from paradraft.data.questions import read_questions
        from paradraft.data.regenerate import regenerate
        from paradraft.sources.records import check_columns, read_object

    if (args.prompts is None) == (args.own_questions is None):
        raise ValueError("give either --prompts (a file of questions) or --own-questions (how many it asks itself)")
    if args.own_questions is not None:
        if args.target is None:
            raise ValueError(f"--own-questions {args.own_questions} needs --target: a server asks no questions")
        if args.columns is not None:
            raise ValueError(f"--columns {args.columns}: own questions have no other names, leave it out")
    if (args.target is None) == (args.endpoint is None):
        raise ValueError("give either --target (a model to run here) or --endpoint (a server's address)")
    others, source = (THERE, "--target") if args.endpoint is None else (HERE, "--endpoint")
    refuse(context, others, f"has no use with {source}: leave it out")
    samples, out = args.samples, args.out
    if args.sampling.is_greedy and samples > 1:
        raise ValueError(f"--samples {samples} would give the same answer {samples} times: raise --temperature above 0")
    check_outputs(out, None if args.own_questions is None else questions_of(out))
    names = read_object(args.columns or "{}", "--columns", '{"user": "instruction"}')
    check_columns(names)
    questions = [] if args.prompts is None else read_questions(args.prompts, samples, names)
    answerer, errors = args.answerer(variables_of(args.chat_template_kwargs)), console(stderr=True)
    if args.prompts is None:
        with _going_on(questions_of(out), errors):
            questions = read_questions(_asked_itself(args, answerer), samples, names)
    asks_plainly = all("prompt" in question.record for question in questions)
    warn_ignored(
        context,
        without_chance(args.sampling.is_greedy),
        *of_drafting(args.speculation),
        (asks_plainly, "without conversations", ("chat_template_kwargs",)),
    )
    with _going_on(out, errors), shown(errors) as report:
        progress = regenerate(answerer, questions, out, report)
    _summarize(progress, out, errors)


@contextmanager
def _going_on(file: Path, errors: Console) -> Iterator[None]:
    """Says after Ctrl-C that a file is kept."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"stopped; {file} keeps what was written, and the same command goes on from there", soft_wrap=True)
        raise


def _asked_itself(args: RegenerateArgs, answerer: Answerer) -> Path:
    """The file of the questions that the target asks itself; those of an interrupted run are kept."""
    from paradraft.data.answer_file import check_settings
    from paradraft.data.local import InProcess
    from paradraft.data.own_questions import write_own_questions

    assert isinstance(answerer, InProcess) and args.own_questions is not None
    file, of = questions_of(args.out), str(answerer.settings["digest of the target"])
    if check_settings(args.out, answerer.settings) and not file.exists():  # before hours of questions
        raise ValueError(f"{args.out} holds answers to other questions: name another --out")
    with news(console(stderr=True), "asking") as report:
        write_own_questions(answerer.engine, file, args.own_questions, of=of, batch_size=args.batch_size, report=report)
    return file


def questions_of(out: Path) -> Path:
    """The file of own questions beside that of their answers."""
    return out.with_name(f"{out.stem}.questions.jsonl")


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

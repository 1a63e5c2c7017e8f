"""`paradraft chat`."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.model_sampling import (
    SEED_BITS,
    UNSAID,
    GenerationConfig,
    asked_by,
    completed,
    expect_penalty,
    in_words,
)
from paradraft.cli.terminal import GREEN, StatusLine, console, explain_empty, tell_advice, write
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.engine.engine import Chunk, Engine
    from paradraft.text.chat_template import Message

HELP = """/reset            forget the conversation
/temperature T    0 is greedy; also /top-p P, /top-k K, /min-p P,
                  /repetition-penalty R, /presence-penalty P, /frequency-penalty P
/seed N           the same seed gives the same answers; without N another one is drawn
/drafter on|off   with a drafter or without; the answers are the same
/help             this list
/quit, Ctrl-D     leave; Ctrl-C ends an answer"""
SETTINGS = (
    "/temperature", "/top-p", "/top-k", "/min-p", "/repetition-penalty", "/presence-penalty", "/frequency-penalty"
)  # fmt: skip
"""Commands that set the fields of `Sampling` of these names."""


@options.with_options
def chat(
    context: typer.Context,
    *,
    target: options.Target,
    speculation: Speculation,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    chat_template_kwargs: options.TemplateVariables = None,
    max_new_tokens: options.NewTokens = 1024,
    sampling: Annotated[Sampling, UNSAID],
    generation_config: GenerationConfig = "auto",
    runtime: Runtime,
    placement: Annotated[Placement, options.Offer(without=("tensor_parallel",))],
) -> None:
    """Talk with a model. What was drafted is green; a line below tells the speed.

    Questions are read from the standard input, one per line. /help lists what can be done meanwhile.
    """
    with importing():
        from paradraft.data.records import read_object
        from paradraft.engine.loader import load_engine
        from paradraft.text.chat_template import template_of

    variables = read_object(chat_template_kwargs or "{}", "--chat-template-kwargs", '{"enable_thinking": false}')
    expect_penalty(generation_config)
    with console(stderr=True).status("loading; the first time passes are built for this CPU"):
        runtime = replace(runtime, width=speculation.pass_width)
        engine = load_engine(target, speculation, kept_rows=1, runtime=runtime, placement=placement, tries_plain=True)
    template_of(engine.target.tokenizer, variables)  # raises ValueError
    asked = asked_by(engine.target, target, generation_config)
    sampling = completed(context, sampling, asked)
    options.warn_ignored(
        context,
        options.without_chance(sampling.is_greedy),
        options.without_drafter(speculation),
        options.with_own_tree(speculation),
        options.with_gamma(speculation),
        options.without_process(placement),
    )
    if asked or not sampling.is_greedy:
        told = "; --generation-config none leaves out what the model asks for" if asked else ""
        print(f"paradraft: {in_words(sampling)}{told}", file=sys.stderr)
    with engine:
        Chat(engine, sampling, system=system, variables=variables, max_new_tokens=max_new_tokens).run()
        tell_advice(engine)


class Chat:
    """A conversation with one person.

    Args:
        engine: keeps the cache of the last answer, so that a turn is read from there on.
        sampling: of all answers.
        system: what the model is told first.
        variables: of the chat template.
        max_new_tokens: most tokens of an answer; fewer where the model has no room for so many.
    """

    def __init__(
        self, engine: Engine, sampling: Sampling, *, system: str | None, variables: dict[str, Any], max_new_tokens: int
    ) -> None:
        self._with_drafter = self._engine = engine
        self._sampling, self._variables, self._max_new_tokens = sampling, variables, max_new_tokens
        self._told: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._told)

    def run(self) -> None:
        """Until there are no more questions."""
        is_person = sys.stdin.isatty()
        if is_person:
            with suppress(ImportError):
                import readline  # noqa: F401  # lets the lines be edited, and earlier ones be found
            print("Ask something; /help tells what else there is.", file=sys.stderr)
        while True:
            try:
                line = input("> " if is_person else "").strip()
            except EOFError:
                write("\n" if is_person else "")
                return
            except KeyboardInterrupt:
                if not is_person:
                    raise
                print("\n/quit or Ctrl-D leaves.", file=sys.stderr)
                continue
            if line in ("/quit", "/exit"):
                return
            try:
                if line.startswith("/"):
                    print(self.command(line), file=sys.stderr)
                elif line:
                    self.ask(line)
            except ValueError as error:  # a mistake does not end the conversation
                print(f"paradraft: {' '.join(str(error).split())}", file=sys.stderr)

    def command(self, line: str) -> str:
        """Does what a line that begins with a slash asks for; returns what is to be said of it.

        Raises:
            ValueError: there is no such command, or it lacks its number.
        """
        match line.split():
            case ["/reset"]:
                self.messages = list(self._told)
                return "The conversation is forgotten."
            case [command, number] if command in SETTINGS:
                setting: dict[str, Any] = {command[1:].replace("-", "_"): number_in(number, command)}
                self._sampling = replace(self._sampling, **setting)
                return f"{in_words(self._sampling).capitalize()}."
            case [command] if command in SETTINGS:
                raise ValueError(f"{command} needs a number, such as {command} 1")
            case ["/seed"]:
                return self.command(f"/seed {secrets.randbits(SEED_BITS)}")
            case ["/seed", number] if number.isdecimal():
                self._sampling = replace(self._sampling, seed=int(number))
                return f"Seed {number}." + (" At temperature 0 it changes nothing." if self._sampling.is_greedy else "")
            case ["/drafter", ("on" | "off") as state]:
                self._engine = self._with_drafter if state == "on" else self._plain()
                return f"Drafter {state}."
            case ["/help"]:
                return HELP
        raise ValueError(f"there is no command {line!r}; /help lists them")

    def _plain(self) -> Engine:
        """The same target without a drafter, which may not say what the drafter forbids either."""
        from paradraft.drafters.none import NoDrafter
        from paradraft.engine.engine import Engine

        drafted = self._with_drafter
        return Engine(drafted.target, NoDrafter(drafted.drafter.reserved_tokens), Speculation(k=1), kept_rows=1)

    def ask(self, question: str) -> None:
        """Prints the answer to a question, as it comes.

        Raises:
            ValueError: the model has no room for it, or its template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        tokens = self._engine.chat_tokens(messages, self._variables)
        room = self._engine.target.capacity - len(tokens)
        if room < 1:
            raise ValueError(
                f"the conversation has {number_of(len(tokens), 'token')}, and the model has room for "
                f"{self._engine.target.capacity}: /reset begins anew"
            )
        chunks = self._engine.stream(tokens, max_new_tokens=min(self._max_new_tokens, room), sampling=self._sampling)
        told = ""
        with StatusLine() as status, until_interrupted() as is_interrupted, closing(chunks):
            progress = Progress()
            for chunk in chunks:
                status.write(chunk.drafted_text, GREEN)
                status.write(chunk.own_text)
                told += chunk.text
                progress.add(chunk)
                status.show(progress.line)
                if is_interrupted():
                    break
        explain_empty(told, chunk)
        self.messages = [*messages, {"role": "assistant", "content": told}]
        print(f"[{progress.line}{', interrupted' if is_interrupted() else ''}]", file=sys.stderr)


def number_in(text: str, command: str) -> float:
    """The number of a command; a whole one is an int.

    Raises:
        ValueError: it is none.
    """
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise ValueError(f"{command} {text}: give a number, such as {command} 1")


class Progress:
    """How fast an answer comes."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._rounds = self._tokens = self._drafted = 0

    def add(self, chunk: Chunk) -> None:
        """Another piece."""
        self._rounds += 1
        self._tokens += len(chunk.tokens)
        self._drafted += chunk.accepted

    @property
    def line(self) -> str:
        """In words."""
        seconds = time.perf_counter() - self._began_s
        return (
            f"{number_of(self._tokens, 'token')}, {self._tokens / seconds:.0f} tokens/s, "
            f"{self._tokens / max(self._rounds, 1):.2f} tokens per pass, "
            f"{100 * self._drafted / max(self._tokens, 1):.0f} % drafted"
        )


@contextmanager
def until_interrupted() -> Iterator[Any]:
    """Inside, the first Ctrl-C is noted, a second one is what it always is; gives what tells whether there was one."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        noted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, before)

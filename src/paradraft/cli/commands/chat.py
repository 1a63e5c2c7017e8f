"""`paradraft chat`."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradraft.cli import options
from paradraft.cli.engine_args import EngineArgs, tell_reason
from paradraft.cli.ignored import of_drafting, warn_ignored, without_chance
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
from paradraft.cli.options import option
from paradraft.cli.terminal import GREEN, StatusLine, explain_empty, tell_advice, write
from paradraft.cli.values import variables_of
from paradraft.engine.speculation import Speculation
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from paradraft.engine.answers import Chunk
    from paradraft.engine.engine import Engine
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
"""Commands that set a field of `Sampling`."""


@dataclass(frozen=True, kw_only=True)
class ChatArgs(EngineArgs):
    """Options of `paradraft chat`."""

    system: Annotated[str | None, option("System prompt.")] = None
    chat_template_kwargs: options.TemplateVariables = None
    max_new_tokens: options.NewTokens = 1024
    sampling: Annotated[Sampling, UNSAID]
    generation_config: GenerationConfig = "auto"
    placement: Annotated[Placement, options.Offer(without=("tensor_parallel",))]


@options.with_options
def chat(context: typer.Context, *, args: ChatArgs) -> None:
    """Talk with a model. What was drafted is green; a line below tells the speed.

    Questions are read from the standard input, one per line. /help lists what can be done meanwhile.
    """
    with importing():
        from paradraft.text.chat_template import template_of

    variables = variables_of(args.chat_template_kwargs)
    expect_penalty(args.generation_config)
    engine = args.load(kept_rows=1)
    template_of(engine.target.tokenizer, variables)  # raises ValueError
    defaults = asked_by(engine.target, args.target, args.generation_config)
    sampling = completed(context, args.sampling, defaults)
    tell_reason(engine)
    warn_ignored(context, without_chance(sampling.is_greedy), *of_drafting(engine.speculation, args.placement))
    if defaults or not sampling.is_greedy:
        hint = "; --generation-config none leaves out what the model asks for" if defaults else ""
        print(f"paradraft: {in_words(sampling)}{hint}", file=sys.stderr)
    with engine:
        Conversation(
            engine, sampling, system=args.system, variables=variables, max_new_tokens=args.max_new_tokens
        ).run()
        tell_advice(engine)


class Conversation:
    """An interactive conversation.

    Args:
        engine: keeps the KV cache of the last answer, so that the next turn prefills only its new tokens.
        max_new_tokens: most tokens of an answer; fewer at the end of the context.
    """

    def __init__(
        self, engine: Engine, sampling: Sampling, *, system: str | None, variables: dict[str, Any], max_new_tokens: int
    ) -> None:
        self._with_drafter = self._engine = engine
        self._sampling, self._variables, self._max_new_tokens = sampling, variables, max_new_tokens
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._system)

    def run(self) -> None:
        """Reads questions until the end of the input or /quit."""
        is_person = sys.stdin.isatty()
        if is_person:
            with suppress(ImportError):
                import readline  # noqa: F401  # line editing and history
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
        """Runs a slash command; returns the message to print.

        Raises:
            ValueError: there is no such command, or its number is missing.
        """
        match line.split():
            case ["/reset"]:
                self.messages = list(self._system)
                return "The conversation is forgotten."
            case [command, value] if command in SETTINGS:
                setting: dict[str, Any] = {command[1:].replace("-", "_"): number_in(value, command)}
                self._sampling = replace(self._sampling, **setting)
                return f"{in_words(self._sampling).capitalize()}."
            case [command] if command in SETTINGS:
                raise ValueError(f"{command} needs a number, such as {command} 1")
            case ["/seed"]:
                return self.command(f"/seed {secrets.randbits(SEED_BITS)}")
            case ["/seed", seed] if seed.isdecimal():
                self._sampling = replace(self._sampling, seed=int(seed))
                return f"Seed {seed}." + (" At temperature 0 it changes nothing." if self._sampling.is_greedy else "")
            case ["/drafter", ("on" | "off") as state]:
                self._engine = self._with_drafter if state == "on" else self._plain()
                return f"Drafter {state}."
            case ["/help"]:
                return HELP
        raise ValueError(f"there is no command {line!r}; /help lists them")

    def _plain(self) -> Engine:
        """Engine of the same target without a drafter; the drafter's reserved tokens stay forbidden."""
        from paradraft.drafters.none import NoDrafter
        from paradraft.engine.engine import Engine

        engine = self._with_drafter
        return Engine(engine.target, NoDrafter(engine.drafter.reserved_tokens), Speculation(k=1), kept_rows=1)

    def ask(self, question: str) -> None:
        """Streams the answer to a question.

        Raises:
            ValueError: the conversation exceeds the context, or the chat template refuses it.
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
        answer = ""
        with StatusLine() as status, until_interrupted() as is_interrupted, closing(chunks):
            speed = Speed()
            for chunk in chunks:
                status.write(chunk.drafted_text, GREEN)
                status.write(chunk.own_text)
                answer += chunk.text
                speed.add(chunk)
                status.show(speed.line)
                if is_interrupted():
                    break
        explain_empty(answer, chunk)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        print(f"[{speed.line}{', interrupted' if is_interrupted() else ''}]", file=sys.stderr)


def number_in(text: str, command: str) -> float:
    """Parses the number of a command, whole ones as int; raises ValueError for other texts."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise ValueError(f"{command} {text}: give a number, such as {command} 1")


class Speed:
    """Decoding speed of an answer."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._rounds = self._tokens = self._drafted = 0

    def add(self, chunk: Chunk) -> None:
        """Counts a chunk."""
        self._rounds += 1
        self._tokens += len(chunk.tokens)
        self._drafted += chunk.accepted

    @property
    def line(self) -> str:
        """Status line."""
        seconds = time.perf_counter() - self._began_s
        return (
            f"{number_of(self._tokens, 'token')}, {self._tokens / seconds:.0f} tokens/s, "
            f"{self._tokens / max(self._rounds, 1):.2f} tokens per pass, "
            f"{100 * self._drafted / max(self._tokens, 1):.0f} % drafted"
        )


@contextmanager
def until_interrupted() -> Iterator[Any]:
    """Catches the first Ctrl-C and restores the handler for the second; yields a function: was there a Ctrl-C?"""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted.is_set
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)

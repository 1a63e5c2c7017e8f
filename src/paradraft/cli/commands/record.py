"""`paradraft record`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.options import Offer, option, with_options
from paradraft.cli.terminal import console, news
from paradraft.cli.values import use_threads
from paradraft.engine.speculation import AUTO, Speculation
from paradraft.files import check_outputs
from paradraft.models.names import is_shape
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.wording import number_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paradraft.engine.engine import Engine
    from paradraft.formats.likely_table import LikelyTable


@dataclass(frozen=True, kw_only=True)
class RecordArgs:
    """Options of `paradraft record`."""

    target: options.Target
    prompts: Annotated[
        Path | None,
        option(
            'JSONL file with one {"prompt": …} or {"messages": […]} per line. By default a chat model asks itself.',
            show_default=False,
        ),
    ] = None
    answers: Annotated[int, option("Answers in all, those of earlier runs included.", least=1)] = 500
    max_new_tokens: options.NewTokens = 192
    sampling: Annotated[Sampling, Offer(without=("min_p", *options.PENALTIES), defaults={"temperature": 0.8})]
    runtime: Runtime
    threads: options.Threads = None
    out: Annotated[
        Path | None, option("The table's file; by default in the user's cache, under a name of the model.")
    ] = None

    def __post_init__(self) -> None:
        if is_shape(self.target):
            raise ValueError(f"{self.target!r} has random weights, so its answers teach nothing: name a model")


@with_options
def record(*, args: RecordArgs) -> None:
    """Record what a model thinks likely, so that answers are drafted better. Run the same command again to go on.

    The model answers questions, its own or yours. What it thought likely after one token and after two becomes a table,
    which the drafter recycle reads (recycle:table=NAME). It holds pieces of these answers: do not share one that was
    made of private texts.
    """
    with importing():
        from paradraft.data.record import RecordProgress
        from paradraft.data.record import record as recorded
        from paradraft.engine.automatic import both
        from paradraft.engine.loader import load_engine
        from paradraft.formats.likely_table import read_table

    use_threads(args.threads)
    name, file = _place(args)
    check_outputs(file)
    known = read_table(file) if file.exists() else None
    facts = {"target": name}
    if known is not None and known.facts.get("target") != name:
        raise ValueError(f"{str(file)!r} is of another model: name another --out")
    done = int(known.facts["answers"]) if known else 0
    engine = load_engine(args.target, Speculation(drafter=AUTO), runtime=args.runtime)
    prompts = islice(_prompts(args, engine, done), max(args.answers - done, 0))
    with news(console(stderr=True), "reading") as report:

        def tell(progress: RecordProgress) -> None:
            speed = progress.tokens / progress.seconds
            skipped = f", {progress.skipped} too long" if progress.skipped else ""
            report(f"{progress.answers}/{args.answers} answers{skipped}, {progress.keys} keys, {speed:.0f} tokens/s")

        def write(table: LikelyTable) -> None:
            table.write(file)

        table = recorded(
            engine, prompts, known=known, facts=facts, max_new_tokens=args.max_new_tokens, sampling=args.sampling,
            write=write, report=tell,
        )  # fmt: skip
    print(f"{number_of(len(table.keys), 'key')} of {table.facts['answers']} answers are in {file}")
    print(f"draft with it by --drafter {both(str(file) if args.out else name)}")
    if args.out is None:
        print(f"paradraft drafters {args.target} measures whether that pays here")


def _place(args: RecordArgs) -> tuple[str, Path]:
    """The table's name and file."""
    from paradraft.models.forward.cpu.build import is_made
    from paradraft.sources.loading import locate
    from paradraft.sources.recorded import table_file, table_name

    locate(args.target, "target")  # a model that is nowhere has no name either
    name = table_name(args.target)
    if name is None:
        raise ValueError(f"{args.target!r} is not on this machine yet: fetch it first, as `paradraft generate` does")
    file = args.out or table_file(name)
    if args.out is None and not is_made(file.parent, "recorded tables are"):
        raise ValueError(f"{str(file.parent)!r} is not a folder of yours alone: set XDG_CACHE_HOME, or name --out")
    return name, file


def _prompts(args: RecordArgs, engine: Engine, first: int) -> Iterator[list[int]]:
    """Prompts from number `first` on: those of the file, again and again with other seeds, or the model's own."""
    from paradraft.data.own_questions import own_questions
    from paradraft.data.prompts import read_prompts, texts_of

    if args.prompts is None:
        yield from (engine.chat_tokens([{"role": "user", "content": text}]) for text in own_questions(engine, first))
        return
    texts = texts_of(read_prompts(args.prompts), lambda: engine.target.tokenizer)
    number = first
    while True:
        yield engine.prompt_tokens(texts[number % len(texts)])
        number += 1

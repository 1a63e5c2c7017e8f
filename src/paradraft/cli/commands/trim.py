"""`paradraft trim`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paradraft.cli import options
from paradraft.cli.importing import importing
from paradraft.cli.options import option, with_options
from paradraft.cli.terminal import console, news
from paradraft.cli.values import use_threads
from paradraft.models.runtime import OF_FEW_BITS, PRECISIONS, precision_of
from paradraft.wording import number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paradraft.sources.load_plan import Checkpoint
    from paradraft.train.init.trim import AnswerCounts, Untrimmed
    from paradraft.train.init.vocabulary_size import Coverage, PassTime


@dataclass(frozen=True, kw_only=True)
class TrimArgs:
    """Options of `paradraft trim`."""

    draft: Annotated[
        str,
        typer.Argument(metavar="DRAFT", help="The draft model: a folder, a Hugging Face id, a .gguf file or pocket."),
    ]
    out: Annotated[Path, option("The folder to write; it must be empty or not exist.")]
    counts: Annotated[
        list[Path],
        option("File of the target's answers, as regenerate writes them and train reads them; may be repeated."),
    ]
    size: Annotated[int | None, option("Rows of the head; by default as many as pay most here.", least=1)] = None
    coverage: Annotated[
        float | None, option("Instead of --size: the share of the answers' tokens that have a row, such as 0.99.")
    ] = None
    target: Annotated[
        str | None,
        option("The target whose pass is timed to choose the size; by default one of ten passes of the draft."),
    ] = None
    draft_dtype: Annotated[
        str | None,
        option(
            f"One of {', '.join(PRECISIONS)}: the dtype in which passes are timed. By default as they are decoded; "
            f"{OF_FEW_BITS} for the trimmed folder of a draft in few bits.",
            check=partial(precision_of, setting="draft_dtype"),
        ),
    ] = None
    threads: options.Threads = None

    def __post_init__(self) -> None:
        if self.size is not None and self.coverage is not None:
            raise ValueError(f"--size {self.size} and --coverage {self.coverage}: give one of them")
        if self.coverage is not None and not 0 < self.coverage <= 1:
            raise ValueError(f"--coverage {self.coverage}: use a number above 0, at most 1")
        if self.target is not None and (self.size is not None or self.coverage is not None):
            raise ValueError(f"--target {self.target} is to choose the size: leave --size and --coverage out")


@with_options
def trim(*, args: TrimArgs) -> None:
    """Leave out the rows of a draft's output head that its target's answers hardly need.

    The folder decodes as any draft (d2t and t2d, as in EAGLE-3). Nothing is trained, and texts stay the target's.
    Without --size and --coverage, passes are timed, and the size is the one that pays most.
    """
    with importing():
        from paradraft.drafters.parts.draft_loading import check_draft_tokens
        from paradraft.formats.folder import check_free
        from paradraft.formats.vocab_map import VocabMap
        from paradraft.sources.load_plan import Checkpoint
        from paradraft.sources.target_loading import facts_of
        from paradraft.train.init.trim import Untrimmed, count, write_trimmed

    use_threads(args.threads)
    check_free(args.out)
    draft = Untrimmed.find(args.draft)
    if args.target is not None:
        check_draft_tokens(draft.checkpoint.folder, facts_of(Checkpoint.find(args.target)))
    with news(console(stderr=True), "counting") as report:
        counts = count(draft, args.counts)
        coverage = counts.coverage(draft.always)
        size, timed, why = _size(args, draft, coverage, report)
        rows = VocabMap.of_counts(counts.counted, size=size, always=draft.always)
        report(f"writing {args.out}")
        write_trimmed(draft, rows, args.out)
        report("timing passes")
        before = timed or _timed(draft.checkpoint, args.draft_dtype)
        dtype = args.draft_dtype or (OF_FEW_BITS if draft.checkpoint.is_quantized else None)
        after = _timed(Checkpoint.at(str(args.out)), dtype)
    for line in [
        *_table(draft, coverage, size, before, after),
        *_notes(draft, counts, size, before, after, dtype),
        *why,
    ]:
        print(line)
    print(f"next: {shlex.join(_decoding(args.out, dtype))}")


def _size(
    args: TrimArgs, draft: Untrimmed, coverage: Coverage, report: Callable[[str], None]
) -> tuple[int, PassTime | None, list[str]]:
    """The number of rows; if it is chosen here, the time that decided it, and why."""
    from paradraft.train.init import vocabulary_size as sizes

    if args.size is not None or args.coverage is not None:
        return args.size or coverage.size_of(args.coverage or 1.0), None, []
    report("timing passes")
    before = sizes.draft_time(draft.checkpoint, args.draft_dtype)
    target_s = sizes.TARGET_PASSES * before.pass_s if args.target is None else sizes.target_time(args.target).pass_s
    best = sizes.best_size(
        coverage, before, target_s=target_s, in_one_pass=sizes.drafts_in_one_pass(draft.checkpoint)
    )  # fmt: skip
    which = "is assumed to take" if args.target is None else "takes"
    why = (
        f"this size gives most tokens per second, {best.speed:.2f} times those of all rows, if {sizes.ACCEPTANCE:.0%} "
        f"of the tokens that have a row are drafted rightly; the target's pass {which} {1e3 * target_s:.3g} ms"
    )
    return best.size, before, [why]


def _timed(checkpoint: Checkpoint, draft_dtype: str | None) -> PassTime | str:
    """The time of a draft's pass, or why it cannot be measured here."""
    from paradraft.errors import is_out_of_memory
    from paradraft.train.init.vocabulary_size import draft_time

    try:
        return draft_time(checkpoint, draft_dtype)
    except ValueError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return "there is too little memory"


def _table(
    draft: Untrimmed, coverage: Coverage, size: int, before: PassTime | str, after: PassTime | str
) -> Iterator[str]:
    """Rows, coverage, bytes and time of the draft before and after."""
    rows: list[tuple[str, ...]] = [
        ("", "before", "trimmed"),
        ("rows of the head", f"{len(draft.row_ids):,}", f"{size:,}"),
    ]
    for words, shares in (("counted tokens", coverage.counted), ("tokens kept aside", coverage.held_out)):
        if shares is not None:
            rows.append((words, f"{float(shares[-1]):.2%}", f"{float(shares[size - 1]):.2%}"))
    if not isinstance(before, str) and not isinstance(after, str):
        rows.append(("head, MB per pass", *(f"{each.head_bytes / 1e6:.1f}" for each in (before, after))))
        rows.append(("pass, ms", *(f"{1e3 * each.pass_s:.3g}" for each in (before, after))))
    else:
        width = draft.checkpoint.config.hidden_size
        rows.append(("head, MB in bfloat16", *(f"{2e-6 * count * width:.1f}" for count in (len(draft.row_ids), size))))
    return (f"{words:<20}{old:>12}{new:>12}" for words, old, new in rows)


def _notes(
    draft: Untrimmed, counts: AnswerCounts, size: int, before: PassTime | str, after: PassTime | str, dtype: str | None
) -> Iterator[str]:
    aside = "a tenth kept aside" if counts.held_out_tokens else "none kept aside, because there are fewer than ten"
    yield f"counted: {number_of(counts.answers, 'answer')} of {number_of(counts.tokens, 'token')}, {aside}"
    if size > (known := int((counts.counted > 0).sum())):
        yield f"{known:,} ids are in them, and the other rows are those of the lowest ids: count more answers"
    for when, time in (("before", before), ("trimmed", after)):
        if isinstance(time, str):
            yield f"not timed, {when}: {time}"
            return
    if draft.checkpoint.is_quantized:
        yield f"its weights, before in few bits, are bfloat16 now: it was timed in {dtype}, decode so"
    if not isinstance(before, str) and not isinstance(after, str) and after.pass_s >= before.pass_s:
        yield "a pass is no faster than before: keep the whole draft, or try another --draft-dtype"


def _decoding(out: Path, dtype: str | None) -> list[str]:
    from paradraft.engine.automatic import drafter_of

    name = drafter_of(str(out))
    of_dtype = [] if dtype is None else ["--draft-dtype", dtype]
    return ["paradraft", "generate", "--target", "TARGET", "--drafter", name, "--draft", str(out), *of_dtype]

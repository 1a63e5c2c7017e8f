"""Records what a model thinks likely after one token and after two: drafts for later answers (`drafters/recycle.py`).

The model answers prompts, its own or a user's, and the answers are read again in wide passes, which give the likeliest
tokens after every token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from paradraft.core import Draft, Request, Verdict
from paradraft.engine.engine import Engine
from paradraft.formats.likely_table import LikelyCounts, LikelyTable
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling

WIDTH = 8
"""Likeliest tokens that are kept."""
EVERY_S = 60.0
"""Seconds after which the table is written again."""


def read_text(target: Target, tokens: Sequence[int], counts: LikelyCounts, *, first: int = 0) -> None:
    """Reads a text in chains as wide as passes are, and adds what is likely after its tokens.

    Args:
        first: index of the first token before which something is added; those of a prompt are not.
    """
    at = max(first, 2)
    if len(tokens) <= at:
        return
    target.start(likeliest=counts.most)
    target.join([Request(tokens=list(tokens[:at]))])
    while at < len(tokens):
        new = list(tokens[at : at + target.lm.width])
        draft = Draft.chain(torch.tensor([new[:-1]], dtype=torch.long, device=target.device))
        out = target.forward(draft)
        target.commit(Verdict(paths=[list(range(len(new) - 1))], tokens=[new]), out)
        assert out.likeliest is not None
        for pair, ids, logits in out.likeliest.places(0, tokens[at - 2], tokens[at - 1]):
            counts.add(pair, ids, logits)
        at += len(new)


@dataclass(frozen=True, kw_only=True)
class RecordProgress:
    """What was read so far: `answers` in all, the prompts that were `skipped` as too long included; `tokens` in
    `seconds`, since the beginning."""

    answers: int
    skipped: int
    tokens: int
    keys: int
    seconds: float


def record(
    engine: Engine,
    prompts: Iterable[list[int]],
    *,
    known: LikelyTable | None,
    facts: dict[str, str],
    max_new_tokens: int,
    sampling: Sampling,
    write: Callable[[LikelyTable], None],
    report: Callable[[RecordProgress], None],
) -> LikelyTable:
    """Lets the target answer prompts, and adds what it thinks likely in its answers to a table.

    The table is written every `EVERY_S` seconds, and at the end, also if the work is interrupted.

    Args:
        known: the table to go on with.
        facts: see `LikelyTable`; numbers of answers and tokens are added.
        sampling: the number of an answer is added to its seed.
    """
    counts = LikelyCounts(most=WIDTH, known=known)
    answers, tokens = (int(known.facts[name]) if known else 0 for name in ("answers", "tokens"))
    started = written = time.monotonic()
    read = skipped = 0

    def table() -> LikelyTable:
        return counts.table({**facts, "answers": str(answers), "tokens": str(tokens + read)})

    try:
        for prompt in prompts:
            if len(prompt) + max_new_tokens > engine.target.capacity:
                answers, skipped = answers + 1, skipped + 1
                continue
            settings = replace(sampling, seed=sampling.seed + answers)
            answer = engine.generate(prompt, max_new_tokens=max_new_tokens, sampling=settings)
            with engine.in_round():
                read_text(engine.target, [*prompt, *answer.tokens], counts, first=len(prompt))
            answers, read = answers + 1, read + len(answer.tokens)
            seconds = time.monotonic() - started
            report(RecordProgress(answers=answers, skipped=skipped, tokens=read, keys=len(counts), seconds=seconds))
            if time.monotonic() - written > EVERY_S:
                write(table())
                written = time.monotonic()
    finally:
        if read:
            write(table())
    if skipped and not read:
        most = engine.target.capacity
        raise ValueError(f"no prompt fits: the target has room for {most} tokens, answer included")
    return table()

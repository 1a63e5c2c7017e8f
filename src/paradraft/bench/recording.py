"""Answers with the logits behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import ABSENT, Draft, Drafter, Prompt, Sampling, TargetOut, Verdict
from paradraft.decode.lengths import Fixed
from paradraft.decode.sequential import Verify, decode
from paradraft.decode.stats import Clock
from paradraft.decode.stops import Stops
from paradraft.drafters.none import NoDrafter
from paradraft.engine import Engine
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt with one seed."""

    number: int
    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Recording:
    """New tokens `[n]`, and the logits `[n, V]` they were chosen by; `[0, 0]` if nobody recorded them."""

    tokens: list[int]
    logits: Tensor


class Recorder(Target):
    """A target that remembers the logits behind which each committed token was chosen."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.lm, target.tokenizer)
        self.rows: list[list[Tensor]] = []
        self._numbers: list[int] = []

    def prefill(self, prompt: Prompt) -> None:
        """See `Target`."""
        super().prefill(prompt)
        self.rows = [[] for _ in prompt.tokens]
        self._numbers = list(range(len(prompt.tokens)))

    def forward(self, draft: Draft) -> TargetOut:
        """See `Target`."""
        self._out = super().forward(draft)
        return self._out

    def commit(self, verdict: Verdict) -> None:
        """See `Target`."""
        for place, number in enumerate(self._numbers):
            path = [node + 1 for node in verdict.path[place].tolist() if node != ABSENT]
            self.rows[number] += list(self._out.logits[place, [0, *path]].clone())
        super().commit(verdict)

    def keep_rows(self, rows: Tensor) -> None:
        """See `Target`."""
        super().keep_rows(rows)
        self._numbers = [self._numbers[row] for row in rows.tolist()]


def record(
    engine: Engine,
    target: Target,
    drafter: Drafter,
    verify: Verify,
    cases: list[Case],
    max_new_tokens: int,
    clock: Clock,
) -> list[Recording]:
    """Answers cases together.

    Args:
        engine: its prompts and length policy.
        target: the engine's, or a `Recorder` of it.
        drafter: the engine's, or none.
        verify: the rule.
        cases: one batch.
        max_new_tokens: tokens of an answer; end-of-sequence tokens do not end it.
        clock: takes the times.
    """
    prompt = engine.prompt([case.prompt for case in cases], tuple(case.sampling for case in cases))
    lengths = Fixed(0) if isinstance(drafter, NoDrafter) else engine.lengths
    stops = Stops(limits=[max_new_tokens] * len(cases), eos_ids=frozenset())
    tokens: list[list[int]] = [[] for _ in cases]
    for step in decode(target, drafter, prompt, verify, stops=stops, lengths=lengths, clock=clock):
        for row, new in zip(step.rows, step.tokens, strict=True):
            tokens[row] += new
    if not isinstance(target, Recorder):
        return [Recording(tokens=new, logits=torch.empty(0, 0)) for new in tokens]
    return [
        Recording(tokens=new, logits=torch.stack(rows[: len(new)]))
        for new, rows in zip(tokens, target.rows, strict=True)
    ]

"""Records answers together with the logits that their tokens were chosen by.

Shape letters: B rows of a batch, N tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Request, TargetOut, Verdict
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.models.forward import NotFiniteError
from paradraft.models.target import Target
from paradraft.parents import logit_rows
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt with one seed; `number` counts prompts from 1."""

    number: int
    prompt: list[int]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class Recording:
    """New tokens `[N]`, and the logits `[N, V]` they were chosen by."""

    tokens: list[int]
    logits: Tensor


class NotNumbersError(Exception):
    """Raised for logits that no token can be chosen by; `position` is the index of that token in the answer."""

    def __init__(self, case: Case, position: int, where: str) -> None:
        super().__init__(
            f"the target's logits are not numbers at prompt {case.number}, seed {case.sampling.seed}, new token "
            f"{position}, {where}"
        )


def are_numbers(logits: Tensor) -> Tensor:
    """Which rows of logits `[…, V]` a token can be chosen by: without NaN and +inf, and not all -inf.

    >>> are_numbers(torch.tensor([[1.0, -torch.inf], [1.0, torch.nan], [-torch.inf, -torch.inf]])).tolist()
    [True, False, False]
    """
    return logits.amax(-1).isfinite()


class RecordingTarget(Target):
    """A target that records the logits by which each committed token was chosen."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.lm, target.tokenizer)
        self.rows: list[list[Tensor]] = []
        """For each prompt, the logits of its tokens."""
        self.not_numbers: list[tuple[int, int]] = []
        """Index of a prompt, and of its new token that was to be chosen by logits that are not numbers."""
        self._prompt_of_row: list[int] = []

    def start(self, *args: Any, **kwargs: Any) -> None:
        """See `Target`."""
        super().start(*args, **kwargs)
        self.rows, self.not_numbers, self._prompt_of_row = [], [], []

    def admit(self, rows: Sequence[int]) -> Committed:
        """See `Target`."""
        self._prompt_of_row += range(len(self.rows), len(self.rows) + len(rows))
        self.rows += [[] for _ in rows]
        return super().admit(rows)

    def forward(self, draft: Draft) -> TargetOut:
        """See `Target`."""
        out = super().forward(draft)
        is_there_BM = torch.nn.functional.pad(draft.tokens != ABSENT, (1, 0), value=True)
        # Checked before a token is chosen, because a rule may fail to choose one.
        is_wrong_BM = is_there_BM & ~are_numbers(out.logits)
        self.not_numbers = [(prompt, len(self.rows[prompt])) for prompt in self._prompts_where(is_wrong_BM.any(1))]
        return out

    def commit(self, verdict: Verdict, out: TargetOut) -> Committed:
        """See `Target`."""
        wrong = []
        for row, path in enumerate(verdict.paths):
            prompt = self._prompt_of_row[row]
            new = out.logits[row, logit_rows(path)].clone()
            wrong += [
                (prompt, len(self.rows[prompt]) + index) for index in (~are_numbers(new)).nonzero()[:, 0].tolist()
            ]
            self.rows[prompt] += list(new)
        # A rejected token may be followed by anything: the text does not depend on it.
        self.not_numbers = wrong
        return super().commit(verdict, out)

    def keep(self, rows: Tensor) -> None:
        """See `Target`."""
        super().keep(rows)
        self._prompt_of_row = [self._prompt_of_row[row] for row in rows.tolist()]

    def _prompts_where(self, is_meant_B: Tensor) -> list[int]:
        return [prompt for prompt, is_meant in zip(self._prompt_of_row, is_meant_B.tolist(), strict=True) if is_meant]


def record(batch: Batch, target: RecordingTarget, cases: list[Case], max_new_tokens: int, name: str) -> list[Recording]:
    """Answers cases together.

    Args:
        batch: of the recording target, without rows.
        max_new_tokens: tokens of an answer; end-of-sequence tokens do not end it.

    Raises:
        NotNumbersError: a token was chosen by logits that are not numbers, or the engine refused to choose one.
    """
    generations = [
        Generation(Request(id=row, tokens=case.prompt, sampling=case.sampling, max_new_tokens=max_new_tokens))
        for row, case in enumerate(cases)
    ]
    try:
        for _ in run(batch, generations):
            _check_numbers(target, cases, name)
    except NotFiniteError as error:
        raise NotNumbersError(cases[error.row], 0, name) from None
    except ValueError:
        _check_numbers(target, cases, name)
        raise
    return [
        Recording(tokens=generation.tokens, logits=torch.stack(rows[: len(generation.tokens)]))
        for generation, rows in zip(generations, target.rows, strict=True)
    ]


def _check_numbers(target: RecordingTarget, cases: list[Case], name: str) -> None:
    if target.not_numbers:
        prompt, position = min(target.not_numbers, key=lambda pair: pair[1])
        raise NotNumbersError(cases[prompt], position, name) from None

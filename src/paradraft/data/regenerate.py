"""Regenerates answers with the target (self-distillation): a drafter is trained on text that its target wrote.

An `Answerer`, the engine of this process or an endpoint, generates the answers. This module selects the questions
without an answer and writes each outcome at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paradraft.data.answer_file import AnswerFile, read_answers
from paradraft.data.questions import Answer, Question, next_prompt, record_of


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one question.

    Args:
        answers: of its turns; fewer than it has if there was no room for the next; none if it failed.
        failure: error message, if there is no answer.
    """

    question: Question
    answers: tuple[Answer, ...] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        assert bool(self.answers) != bool(self.failure)


class Answerer(Protocol):
    """Generates answers."""

    @property
    def settings(self) -> dict[str, object]:
        """Settings that decide the text of the answers; all answers of a file share them."""

    def check(self, questions: list[Question]) -> None:
        """Raises ValueError if these cannot be answered; called before the first one is."""

    def answer(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        """Passes one outcome for every answered or failed question to `take`, in any order."""


@dataclass(kw_only=True)
class RegenerationProgress:
    """Progress of a run.

    Args:
        total: answers requested.
        before: of these, answers that existed before the run.
        shortened: of these, conversations that end early for lack of room.
        tokens: of the written answers.
        started_s: start of the run, by `time.monotonic`.
    """

    total: int
    before: int
    written: int = 0
    shortened: int = 0
    tokens: int = 0
    failed: list[Outcome] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def missing(self) -> int:
        """Answers still missing."""
        return self.total - self.before - self.written


def regenerate(
    answerer: Answerer,
    questions: list[Question],
    out: Path,
    report: Callable[[RegenerationProgress], None] = lambda _: None,
) -> RegenerationProgress:
    """Answers the questions that the file has no answer to, and appends the answers.

    Args:
        questions: all that the complete file answers.
        report: called at the start and after every outcome.

    Returns:
        Counts of the run. Failed questions are not in the file; the same call retries them.

    Raises:
        ValueError: as `read_answers` and `AnswerFile`, or the answerer cannot be used.
    """
    settings, ids = answerer.settings, frozenset(question.id for question in questions)
    # Read before locking too, so that an error leaves no lock file.
    done = read_answers(out, settings, ids).done
    if missing := [question for question in questions if question.id not in done]:
        answerer.check(missing)
    with AnswerFile(out, settings, ids) as file:
        progress = RegenerationProgress(total=len(ids), before=len(file.done))

        def take(outcome: Outcome) -> None:
            if outcome.failure:
                progress.failed.append(outcome)
            else:
                file.append(record_of(outcome.question, outcome.answers))
                progress.written += 1
                progress.shortened += next_prompt(outcome.question, outcome.answers) is not None
                progress.tokens += sum(answer.tokens for answer in outcome.answers)
            report(progress)

        if missing := [question for question in questions if question.id not in file.done]:
            report(progress)
            answerer.answer(missing, take)
    return progress

"""Lets the target answer prompts itself: a drafter is trained on text that its target wrote.

Who answers is an `Answerer`: the engine of this process, or an endpoint. What is common to both
stands here: which questions are left, and that every outcome is written as soon as it is there.
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
    """What became of one question.

    Args:
        question: which.
        answers: of its turns; fewer than it has if there was no room for the next; none if it failed.
        failure: why there is no answer.
    """

    question: Question
    answers: tuple[Answer, ...] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        assert bool(self.answers) != bool(self.failure)


class Answerer(Protocol):
    """Who answers."""

    @property
    def settings(self) -> dict[str, object]:
        """What decides the text of the answers; a file holds answers of one kind only."""

    def check(self, questions: list[Question]) -> None:
        """Raises ValueError if these cannot be asked; called before the first of them is."""

    def answer(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        """Gives `take` one outcome for every question that was asked, in any order."""


@dataclass(kw_only=True)
class Progress:
    """How far a run has come.

    Args:
        total: answers that were asked for.
        before: how many of them were there when the run began.
        written: how many this run wrote.
        shortened: how many of those are conversations that end early for want of room.
        tokens: of the written answers.
        failed: questions without an answer.
        started_s: when answering began, of `time.monotonic`.
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
        """How many answers are not there."""
        return self.total - self.before - self.written


def regenerate(
    answerer: Answerer, questions: list[Question], out: Path, report: Callable[[Progress], None] = lambda _: None
) -> Progress:
    """Answers the questions that the file has no answer to, and appends the answers.

    Args:
        answerer: who answers.
        questions: all that shall be in the file in the end.
        out: the file of answers; see `AnswerFile`.
        report: called at the beginning and after every outcome.

    Returns:
        What was done; whoever failed is not in the file, and the same call asks for them again.

    Raises:
        ValueError: as `read_answers` and `AnswerFile`, or the answerer cannot be asked.
    """
    settings, asked = answerer.settings, frozenset(question.id for question in questions)
    # Read before the lock is taken too, so that a mistake leaves no file behind.
    done = read_answers(out, settings, asked).done
    if left := [question for question in questions if question.id not in done]:
        answerer.check(left)
    with AnswerFile(out, settings, asked) as file:
        progress = Progress(total=len(asked), before=len(file.done))

        def take(outcome: Outcome) -> None:
            if outcome.failure:
                progress.failed.append(outcome)
            else:
                file.append(record_of(outcome.question, outcome.answers))
                progress.written += 1
                progress.shortened += next_prompt(outcome.question, outcome.answers) is not None
                progress.tokens += sum(answer.tokens for answer in outcome.answers)
            report(progress)

        if left := [question for question in questions if question.id not in file.done]:
            report(progress)
            answerer.answer(left, take)
    return progress

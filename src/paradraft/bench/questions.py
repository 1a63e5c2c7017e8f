"""The questions of one task that a target is asked: chosen, and known to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from paradraft.bench.chat import prompt_of
from paradraft.bench.tasks import QUESTIONS, Task
from paradraft.bench.work import Answers, Work
from paradraft.models.texts import opening


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked of one task.

    Args:
        task: which.
        numbers: of the questions in the data, from 1.
        turns: for each question what the user says.
        left_out: the numbers of those that do not fit into the target with their answers.
        max_new_tokens: most tokens of an answer.
        tokenizer: the target's.
        system: the system message.
    """

    task: Task
    numbers: tuple[int, ...]
    turns: tuple[tuple[str, ...], ...]
    left_out: tuple[int, ...]
    max_new_tokens: int
    tokenizer: PreTrainedTokenizerBase
    system: str | None

    @classmethod
    def choose(
        cls,
        task: Task,
        questions: Sequence[tuple[str, ...]],
        number: int | None,
        *,
        max_new_tokens: int | None,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None,
        capacity: int,
    ) -> Questions:
        """So many of a task's questions, spread evenly over those that fit: some data are in order of category.

        Args:
            task: which.
            questions: all of it.
            number: how many; None takes `QUESTIONS` of them, or all if there are fewer.
            max_new_tokens: most tokens of an answer; None takes the task's.
            tokenizer: the target's.
            system: the system message.
            capacity: most tokens, answers included, that the target has room for.

        Raises:
            ValueError: too few fit.
        """
        limit = task.max_new_tokens if max_new_tokens is None else max_new_tokens
        sizes = [_longest(task, turns, tokenizer, system, limit) for turns in questions]
        fitting = [place for place, size in enumerate(sizes) if size <= capacity]
        number = min(QUESTIONS, max(len(fitting), 1)) if number is None else number
        if number < 1:
            raise ValueError(f"num_prompts={number}: ask at least 1 question")
        if number > len(questions):
            raise ValueError(f"num_prompts={number}: task {task.name} has {len(questions)} questions here")
        if number > len(fitting):
            raise ValueError(
                f"task {task.name}: {number} questions are asked for, but of {len(questions)} only {len(fitting)} fit "
                f"into {capacity} tokens, with {limit} new tokens: lower --num-prompts or --max-new-tokens, or raise "
                "--capacity"
            )
        chosen = [fitting[index * len(fitting) // number] for index in range(number)]
        return cls(
            task=task,
            numbers=tuple(place + 1 for place in chosen),
            turns=tuple(questions[place] for place in chosen),
            left_out=tuple(place + 1 for place, size in enumerate(sizes) if size > capacity),
            max_new_tokens=limit,
            tokenizer=tokenizer,
            system=system,
        )

    @property
    def count(self) -> int:
        """How many prompts they are: one for each turn."""
        return sum(map(len, self.turns))

    @property
    def work(self) -> Work:
        """What methods are to answer."""
        return Work(count=self.count, max_new_tokens=self.max_new_tokens, prompts=self.prompts, name=self.task.name)

    def prompts(self, answers: Answers) -> list[str]:
        """The prompts of all turns, question by question.

        Later turns are prompts that hold the target's own answers to the earlier ones. Each turn's answers are
        asked for once, before anything is timed, so all methods read the same prompts.
        """
        said: list[list[str]] = [[] for _ in self.turns]
        prompts: list[list[str]] = [[] for _ in self.turns]
        for turn in range(max(map(len, self.turns))):
            asking = [place for place, turns in enumerate(self.turns) if turn < len(turns)]
            for place in asking:
                one = prompt_of(self.task, self.turns[place], said[place], self.tokenizer, self.system)
                prompts[place].append(one)
            again = [place for place in asking if turn + 1 < len(self.turns[place])]
            if again:
                found = answers([prompts[place][-1] for place in again], self.max_new_tokens)
                for place, answer in zip(again, found, strict=True):
                    said[place].append(answer)
        return [one for each in prompts for one in each]

    def as_json(self) -> dict[str, object]:
        """What a result says of them."""
        return {
            "name": self.task.name,
            "questions": list(self.numbers),
            "left_out": list(self.left_out),
            "turns": self.count,
            "chat_template": bool(self.tokenizer.chat_template),
            "system": self.system,
            "max_new_tokens": self.max_new_tokens,
        }

    def warning(self) -> str | None:
        """Says which questions are left out."""
        if not self.left_out:
            return None
        few = ", ".join(map(str, self.left_out[:8])) + ", …" * (len(self.left_out) > 8)
        return (
            f"task {self.task.name}: {len(self.left_out)} questions are too long for the target with "
            f"{self.max_new_tokens} new tokens, and left out: {few}"
        )


def _longest(
    task: Task, turns: Sequence[str], tokenizer: PreTrainedTokenizerBase, system: str | None, limit: int
) -> int:
    """Most tokens that a question and its answers can have."""
    asked = opening(prompt_of(task, turns, ["a"] * (len(turns) - 1), tokenizer, system), tokenizer)
    return len(asked) + limit * len(turns)

"""The tasks of the PARD paper and two chat benchmarks, with their data sets and prompts.

The paper (An et al. 2025, section 4.1) names HumanEval, GSM8K and MATH500 and measures at temperature 0
(Tables 1 and 2). It gives neither prompts, nor limits, nor the number of questions. Those here are of the
authors' code (AMD-AGI/PARD): chat template, the instruction in front of HumanEval, 512 new tokens, and of
their vLLM script's default 80 questions. MT-bench and Spec-Bench have Spec-Bench's own limit, 1024 new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.bench.setup import Answers, Workload
from paradraft.sources.records import Record, records
from paradraft.text.final_number import final_number
from paradraft.text.tokenization import encode_prompt
from paradraft.wording import number_of

QUESTIONS = 80
"""Default number of questions of a task."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A set of questions.

    Args:
        source: its Hugging Face dataset, as `records` reads it; None if it has none.
        fields: the first of these that a record has is the question, or the user's turns in a list.
        max_new_tokens: most tokens of an answer; only the model's own end comes earlier.
        asks: the user's message around the question.
        plain: the same for a model without a chat template.
        file_at: URL of its file, if it is no dataset.
        answer: the field with the right answer, of which the last number counts; "" where answers are not marked.
    """

    name: str
    source: str | None
    fields: tuple[str, ...]
    max_new_tokens: int
    asks: str = "{}"
    plain: str = "Question: {}\nAnswer:"
    file_at: str = ""
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskQuestion:
    """A question, as the turns of its user, and the number that right answers end with; None where that is unknown."""

    turns: tuple[str, ...]
    right: Decimal | None = None


TASKS = {
    task.name: task
    for task in (
        Task(
            name="humaneval", source="openai/openai_humaneval:test", fields=("prompt",), max_new_tokens=512,
            asks="Complete the code I provided.\n{}", plain="{}",
        ),
        Task(name="gsm8k", source="openai/gsm8k/main:test", fields=("question",), max_new_tokens=512, answer="answer"),
        Task(name="math500", source="HuggingFaceH4/MATH-500:test", fields=("problem",), max_new_tokens=512),
        Task(
            name="mtbench", source="HuggingFaceH4/mt_bench_prompts:train", fields=("prompt", "turns"),
            max_new_tokens=1024,
        ),
        Task(
            name="specbench", source=None, fields=("turns",), max_new_tokens=1024,
            file_at="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        ),
    )
}  # fmt: skip


def tasks_of(names: str) -> list[Task]:
    """The tasks of names separated by commas.

    Raises:
        ValueError: a name is unknown, or comes twice.
    """
    tasks: list[Task] = []
    for name in (name.strip() for name in names.split(",")):
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}: use some of {', '.join(TASKS)}")
        if TASKS[name] in tasks:
            raise ValueError(f"--task {names}: {name!r} comes twice, name it once")
        tasks.append(TASKS[name])
    return tasks


def files_of(tasks: Sequence[Task], named: Sequence[str]) -> dict[str, Path]:
    """The file of the questions of each task.

    Args:
        named: for each file NAME=FILE, or FILE alone if there is only one task.

    Raises:
        ValueError: the task of a file is unclear, a file is missing, or a task has two.

    >>> files_of([TASKS["gsm8k"], TASKS["math500"]], [f"gsm8k={__file__}"])["gsm8k"].name
    'tasks.py'
    """
    files: dict[str, Path] = {}
    for argument in named:
        name, equals, file = argument.partition("=")
        if not equals or name not in TASKS:
            if len(tasks) > 1:
                raise ValueError(
                    f"--task-data {argument}: there are {len(tasks)} tasks, write {tasks[0].name}=FILE.jsonl"
                )
            name, file = tasks[0].name, argument
        if name not in [task.name for task in tasks]:
            raise ValueError(f"--task-data {argument}: {name} is not among the tasks, add it to --task")
        if name in files:
            raise ValueError(f"--task-data {argument}: {name} has a file already, {str(files[name])!r}")
        if not Path(file).is_file():
            raise ValueError(f"--task-data {argument}: there is no file {file!r}")
        files[name] = Path(file)
    return files


def read_questions(task: Task, file: Path | None) -> list[TaskQuestion]:
    """All questions of a task.

    Args:
        file: a local copy, JSONL or Parquet in the dataset's own form; None downloads it.

    Raises:
        ValueError: there is no such file or dataset, or a record has no question.
    """
    if file is None and task.source is None:
        raise ValueError(
            f"task {task.name} is no Hugging Face dataset: download {task.file_at}, name it as --task-data"
        )
    source = file or Path(str(task.source))
    questions = [
        TaskQuestion(turns=_turns(task, where, record), right=final_number(str(record.get(task.answer, ""))))
        for where, record in records(source, f"data of task {task.name}:")
    ]
    if not questions:
        raise ValueError(f"data of task {task.name}: {str(source)!r} has no questions")
    return questions


def _turns(task: Task, where: str, record: Record) -> tuple[str, ...]:
    question = next((record[field] for field in task.fields if field in record), None)
    if question is None:
        wanted = " or ".join(map(repr, task.fields))
        raise ValueError(
            f"{where}: no field {wanted}, where the questions of task {task.name} are: it has {list(record)}"
        )
    turns = [question] if isinstance(question, str) else question
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: the question of task {task.name} must be a text, or a list of texts, and not empty")
    return tuple(turns)


def prompt_of(
    task: Task, turns: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, system: str | None
) -> str:
    """The prompt of the first turn without an answer.

    With a chat template the prompt is written in it, up to the generation prompt, and without thinking where the
    template has a switch for that, as in the authors' code. Without a template the question is written plainly. A BOS
    that the template writes stays the only one: see `paradraft.text.tokenization.encode_prompt`.

    Args:
        system: the system message; None for none, which leaves the template's own if it has one.

    Raises:
        ValueError: the template refuses such a conversation.
    """
    open_turns = [turn for _, turn in zip(range(len(answers) + 1), turns, strict=False)]
    if not tokenizer.chat_template:
        # An answer follows its question as text would, and a blank line comes before the next.
        earlier = [
            f"{task.plain.format(turn)} {answer.strip()}\n\n" for turn, answer in zip(open_turns, answers, strict=False)
        ]
        return "".join(earlier) + task.plain.format(open_turns[-1])
    messages = [] if system is None else [{"role": "system", "content": system}]
    for index, turn in enumerate(open_turns):
        messages.append({"role": "user", "content": task.asks.format(turn)})
        messages += [{"role": "assistant", "content": answer} for answer in answers[index : index + 1]]
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(f"task {task.name}: the target's chat template refuses its questions: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions of one task that are asked.

    Args:
        numbers: of the questions in the data, from 1.
        turns: of the user, for each question.
        right: the number that right answers to each question end with, if the task's answers are marked.
        left_out: numbers of the questions that do not fit into the target with their answers.
    """

    task: Task
    numbers: tuple[int, ...]
    turns: tuple[tuple[str, ...], ...]
    right: tuple[Decimal | None, ...]
    left_out: tuple[int, ...]
    max_new_tokens: int
    tokenizer: PreTrainedTokenizerBase
    system: str | None

    @classmethod
    def choose(
        cls,
        task: Task,
        questions: Sequence[TaskQuestion],
        count: int | None,
        *,
        max_new_tokens: int | None,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None,
        capacity: int,
    ) -> Questions:
        """Chooses questions of a task, spread evenly over those that fit, because some data are sorted by category.

        Args:
            count: None takes `QUESTIONS` of them, or all if there are fewer.
            max_new_tokens: most tokens of an answer; None takes the task's.
            capacity: most tokens of the target, answers included.

        Raises:
            ValueError: too few fit.
        """
        limit = task.max_new_tokens if max_new_tokens is None else max_new_tokens
        sizes = [_longest(task, question.turns, tokenizer, system, limit) for question in questions]
        fitting = [position for position, size in enumerate(sizes) if size <= capacity]
        count = min(QUESTIONS, max(len(fitting), 1)) if count is None else count
        if count < 1:
            raise ValueError(f"num_prompts={count}: ask at least 1 question")
        if count > len(questions):
            raise ValueError(f"num_prompts={count}: task {task.name} has {len(questions)} questions here")
        if count > len(fitting):
            raise ValueError(
                f"task {task.name}: {count} questions are asked for, but of {len(questions)} only {len(fitting)} fit "
                f"into {capacity} tokens, with {limit} new tokens: lower --num-prompts or --max-new-tokens, or raise "
                "--capacity"
            )
        chosen = [fitting[index * len(fitting) // count] for index in range(count)]
        return cls(
            task=task,
            numbers=tuple(position + 1 for position in chosen),
            turns=tuple(questions[position].turns for position in chosen),
            right=tuple(questions[position].right for position in chosen),
            left_out=tuple(position + 1 for position, size in enumerate(sizes) if size > capacity),
            max_new_tokens=limit,
            tokenizer=tokenizer,
            system=system,
        )

    @property
    def count(self) -> int:
        """Number of prompts: one for each turn."""
        return sum(map(len, self.turns))

    @property
    def work(self) -> Workload:
        """The workload of these questions."""
        return Workload(
            count=self.count, max_new_tokens=self.max_new_tokens, prompts=self.prompts, name=self.task.name,
            right_share=None if None in self.right else self.right_share,
        )  # fmt: skip

    def right_share(self, answers: Sequence[str]) -> float:
        """The share of answers, one of each question, whose last number is the right one."""
        marks = [final_number(answer) == right for answer, right in zip(answers, self.right, strict=True)]
        return sum(marks) / len(marks)

    def prompts(self, answers: Answers) -> list[str]:
        """The prompts of all turns, question by question.

        Prompts of later turns hold the target's own answers to the earlier ones. These are generated once, before
        anything is timed, so all methods read the same prompts.
        """
        answered: list[list[str]] = [[] for _ in self.turns]
        prompts: list[list[str]] = [[] for _ in self.turns]
        for turn in range(max(map(len, self.turns))):
            asking = [index for index, turns in enumerate(self.turns) if turn < len(turns)]
            for index in asking:
                prompt = prompt_of(self.task, self.turns[index], answered[index], self.tokenizer, self.system)
                prompts[index].append(prompt)
            again = [index for index in asking if turn + 1 < len(self.turns[index])]
            if again:
                replies = answers([prompts[index][-1] for index in again], self.max_new_tokens)
                for index, answer in zip(again, replies, strict=True):
                    answered[index].append(answer)
        return [prompt for each in prompts for prompt in each]

    def as_json(self) -> dict[str, object]:
        """Plain values, for a result."""
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
        """A line on the questions that are left out; None if there are none."""
        if not self.left_out:
            return None
        few = ", ".join(map(str, self.left_out[:8])) + ", …" * (len(self.left_out) > 8)
        return (
            f"task {self.task.name}: left out {number_of(len(self.left_out), 'question')}, too long for the target "
            f"with {number_of(self.max_new_tokens, 'new token')}: {few}"
        )


def _longest(
    task: Task, turns: Sequence[str], tokenizer: PreTrainedTokenizerBase, system: str | None, limit: int
) -> int:
    """Most tokens that a question and its answers can have."""
    prompt = encode_prompt(prompt_of(task, turns, ["a"] * (len(turns) - 1), tokenizer, system), tokenizer)
    return len(prompt) + limit * len(turns)

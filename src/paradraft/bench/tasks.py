"""The tasks of the PARD paper and two of chat, as questions: where they are, and how they are asked.

The paper (An et al. 2025, section 4.1) names HumanEval, GSM8K and MATH500 and measures at temperature 0
(Tables 1 and 2). It gives neither prompts, nor limits, nor how many questions. Those here are of the
authors' code (AMD-AGI/PARD): chat template, the instruction in front of HumanEval, 512 new tokens, and of
their vLLM script's default 80 questions. MT-bench and Spec-Bench have Spec-Bench's own limit, 1024 new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paradraft.sources import Record, records

QUESTIONS = 80
"""How many questions of a task are asked, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A set of questions.

    Args:
        name: what `--task` calls it.
        source: its Hugging Face dataset, as `records` reads it; None if it has none.
        fields: the first of these that a record has is the question, or the user's turns in a list.
        max_new_tokens: most tokens of an answer; the model's own end comes first, nothing else ends it.
        asks: what a user says, around the question.
        plain: the same for a model without a chat template.
        file_at: where its file can be downloaded, if it is no dataset.
    """

    name: str
    source: str | None
    fields: tuple[str, ...]
    max_new_tokens: int
    asks: str = "{}"
    plain: str = "Question: {}\nAnswer:"
    file_at: str = ""


TASKS = {
    task.name: task
    for task in (
        Task(
            name="humaneval", source="openai/openai_humaneval:test", fields=("prompt",), max_new_tokens=512,
            asks="Complete the code I provided.\n{}", plain="{}",
        ),
        Task(name="gsm8k", source="openai/gsm8k/main:test", fields=("question",), max_new_tokens=512),
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
    """The tasks behind names with commas between them.

    Raises:
        ValueError: a name is unknown, or comes twice.
    """
    found: list[Task] = []
    for name in (name.strip() for name in names.split(",")):
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}: use some of {', '.join(TASKS)}")
        if TASKS[name] in found:
            raise ValueError(f"--task {names}: {name!r} comes twice, name it once")
        found.append(TASKS[name])
    return found


def files_of(tasks: Sequence[Task], given: Sequence[str]) -> dict[str, Path]:
    """Which file has the questions of which task.

    Args:
        tasks: those that are asked.
        given: for each file NAME=FILE, or FILE alone if there is only one task.

    Raises:
        ValueError: it is not clear whose file one is, a file is missing, or a task has two.

    >>> files_of([TASKS["gsm8k"], TASKS["math500"]], [f"gsm8k={__file__}"])["gsm8k"].name
    'tasks.py'
    """
    found: dict[str, Path] = {}
    for one in given:
        name, equals, file = one.partition("=")
        if not equals or name not in TASKS:
            if len(tasks) > 1:
                raise ValueError(f"--task-data {one}: there are {len(tasks)} tasks, write {tasks[0].name}=FILE.jsonl")
            name, file = tasks[0].name, one
        if name not in [task.name for task in tasks]:
            raise ValueError(f"--task-data {one}: {name} is not among the tasks, add it to --task")
        if name in found:
            raise ValueError(f"--task-data {one}: {name} has a file already, {str(found[name])!r}")
        if not Path(file).is_file():
            raise ValueError(f"--task-data {one}: there is no file {file!r}")
        found[name] = Path(file)
    return found


def read_questions(task: Task, file: Path | None) -> list[tuple[str, ...]]:
    """All questions of a task, each the turns of its user.

    Args:
        task: which.
        file: a local copy, JSONL or Parquet in the dataset's own form; None downloads it.

    Raises:
        ValueError: there is no such file or dataset, or a record (named by number) has no question.
    """
    if file is None and task.source is None:
        raise ValueError(
            f"task {task.name} is no Hugging Face dataset: download {task.file_at}, name it as --task-data"
        )
    source = file or Path(str(task.source))
    found = [_turns(task, place, record) for place, record in records(source, f"data of task {task.name}:")]
    if not found:
        raise ValueError(f"data of task {task.name}: {str(source)!r} has no questions")
    return found


def _turns(task: Task, place: str, record: Record) -> tuple[str, ...]:
    given = next((record[field] for field in task.fields if field in record), None)
    if given is None:
        wanted = " or ".join(map(repr, task.fields))
        raise ValueError(
            f"{place}: no field {wanted}, where the questions of task {task.name} are: it has {list(record)}"
        )
    turns = [given] if isinstance(given, str) else given
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place}: the question of task {task.name} must be a text, or a list of texts, and not empty")
    return tuple(turns)

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

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.bench.setup import Answers, Workload
from paradraft.data.records import Record, records
from paradraft.text.tokenization import encode_prompt
from paradraft.wording import number_of

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
    """The tasks of names with commas between them.

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


def prompt_of(
    task: Task, turns: Sequence[str], answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, system: str | None
) -> str:
    """The prompt of the first turn that has no answer yet.

    With a chat template the target is asked in it, up to the generation prompt, and without thinking where the
    template has a switch for that, as in the authors' code. Without one the question is written plainly. A BOS
    that the template writes stays the only one: see `paradraft.text.tokenization.encode_prompt`.

    Args:
        task: whose question it is.
        turns: what the user says; more than there are answers.
        answers: what the target has said to the first of them.
        tokenizer: the target's.
        system: the system message; None for none, which leaves the template's own if it has one.

    Raises:
        ValueError: the template refuses such a conversation.
    """
    asked = [turn for _, turn in zip(range(len(answers) + 1), turns, strict=False)]
    if not tokenizer.chat_template:
        # An answer follows its question as text would, and a blank line comes before the next.
        said = [f"{task.plain.format(turn)} {answer.strip()}\n\n" for turn, answer in zip(asked, answers, strict=False)]
        return "".join(said) + task.plain.format(asked[-1])
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, turn in enumerate(asked):
        messages.append({"role": "user", "content": task.asks.format(turn)})
        messages += [{"role": "assistant", "content": answer} for answer in answers[number : number + 1]]
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(f"task {task.name}: the target's chat template refuses its questions: {error}") from None


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
    def work(self) -> Workload:
        """What methods are to answer."""
        return Workload(count=self.count, max_new_tokens=self.max_new_tokens, prompts=self.prompts, name=self.task.name)

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
            f"task {self.task.name}: left out {number_of(len(self.left_out), 'question')}, too long for the target "
            f"with {number_of(self.max_new_tokens, 'new token')}: {few}"
        )


def _longest(
    task: Task, turns: Sequence[str], tokenizer: PreTrainedTokenizerBase, system: str | None, limit: int
) -> int:
    """Most tokens that a question and its answers can have."""
    asked = encode_prompt(prompt_of(task, turns, ["a"] * (len(turns) - 1), tokenizer, system), tokenizer)
    return len(asked) + limit * len(turns)

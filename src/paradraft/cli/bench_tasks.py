"""What `paradraft bench --task` asks, and how several tasks are reported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paradraft.models.loading import load_config, load_tokenizer, locate, room
from paradraft.models.shapes import is_shape

if TYPE_CHECKING:
    from paradraft.bench.questions import Questions


def check_alone(names: str, target: str, prompts: Path | None, *, drawn: Sequence[Path | None]) -> None:
    """Raises ValueError for what does not go together with tasks.

    Args:
        names: of the tasks.
        target: whom they are asked.
        prompts: a prompt file.
        drawn: files and folders for what shows one task.
    """
    if prompts is not None:
        raise ValueError(f"--prompts {prompts}: --task {names} has prompts of its own; give one or the other")
    if is_shape(target):
        raise ValueError(f"--task {names}: {target!r} reads no texts, its prompts are random: give --prompt-tokens")
    if "," in names and any(drawn):
        raise ValueError(f"--task {names}: --plot and --report show one task; name one, or use --json")


def questions_for(
    target: str,
    names: str,
    data: Sequence[str],
    *,
    number: int | None,
    max_new_tokens: int | None,
    system: str | None,
    capacity: int | None,
) -> list[Questions]:
    """The questions of all tasks, chosen before any weights are loaded; says which of them are left out.

    Raises:
        ValueError: an unknown task or target, data that cannot be read, or too few questions.
    """
    from paradraft.bench.questions import Questions
    from paradraft.bench.tasks import files_of, read_questions, tasks_of

    tasks = tasks_of(names)
    files = files_of(tasks, data)
    folder = locate(target, "target")
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    found = [
        Questions.choose(
            task,
            read_questions(task, files.get(task.name)),
            number,
            max_new_tokens=max_new_tokens,
            tokenizer=tokenizer,
            system=system,
            capacity=room(config, capacity),
        )
        for task in tasks
    ]
    for warning in filter(None, (one.warning() for one in found)):
        print(f"warning: {warning}", file=sys.stderr)
    return found


def report_mean(results: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prints what several tasks have in common, and gives what their file holds of it.

    Args:
        results: of each task.

    Returns:
        What the file holds: the title, the result of each task, and the mean; and the summaries alone.
    """
    from paradraft.bench.mean import mean_of, mean_table
    from paradraft.bench.report import marked

    arguments = next(iter(results.values()))["arguments"]
    title = marked(f"{', '.join(results)}: {arguments['target']}", arguments)
    summaries = {name: result["methods"] for name, result in results.items()}
    mean = mean_of(summaries)
    Console().print(mean_table(summaries, mean, title))
    return {"title": title, "tasks": results, "mean": mean}, {**summaries, "mean": mean}

"""Models, prompts and seeds of the scripts that compare drafts and rules over many answers."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paradraft.bench.report.summary import write_json
from paradraft.bench.setup import held_out_prompts
from paradraft.bench.synthetic import without_ends
from paradraft.bench.tasks import TASKS, prompt_of, read_questions
from paradraft.core import Drafter
from paradraft.drafters import load_drafter
from paradraft.environment import describe_machine
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target

CHATS = Path(__file__).parents[1] / "prompts" / "chat.jsonl"


def options(description: str | None, *, drafter: str, prompts: int, tokens: int = 64) -> argparse.ArgumentParser:
    """The options of all these scripts, with a script's defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--draft")
    parser.add_argument("--drafter", default=drafter)
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--temperatures", default="0.8,1")
    parser.add_argument("--data", action="append", default=[], help="NAME=FILE of a task, or chat=FILE of chats")
    parser.add_argument("--json", type=Path)
    return parser


def loaded(args: argparse.Namespace) -> tuple[Target, Drafter, list[str]]:
    """Target, drafter and prompts: as many of each task, evenly spread, and of the chats, `CHATS` without others; for
    the pocket family its own prompts. Answers do not end before their limit."""
    width = {"width": args.width} if "width" in args else {}
    runtime = Runtime(device="cpu", capacity=1024 if args.data else None, **width)
    target = load_target(args.target, runtime)
    without_ends(target)
    drafter = load_drafter(args.drafter, target, draft=args.draft, runtime=runtime)
    if not args.data:
        return target, drafter, held_out_prompts(args.prompts, None, args.target)
    files = dict(item.split("=", 1) for item in args.data)
    chats = Path(files.pop("chat", CHATS))
    share, prompts = args.prompts // (len(files) + 1), []
    for name, file in files.items():
        questions = read_questions(TASKS[name], Path(file))
        some = questions[:: len(questions) // share][:share]
        prompts += [prompt_of(TASKS[name], question.turns, (), target.tokenizer, None) for question in some]
    return target, drafter, prompts + held_out_prompts(args.prompts - len(prompts), chats, args.target)


def batches(
    prompts: list[str], seeds: int, rows: int, sampling: dict[str, Any]
) -> Iterator[tuple[list[str], list[Sampling]]]:
    """All prompts with all seeds, some at a time."""
    cases = [
        (prompt, Sampling(seed=100 * at + seed, **sampling))
        for seed in range(seeds)
        for at, prompt in enumerate(prompts)
    ]
    for first in range(0, len(cases), rows):
        some = cases[first : first + rows]
        yield [prompt for prompt, _ in some], [each for _, each in some]


def standard_error(values: list[float]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def write(args: argparse.Namespace, figures: dict[str, Any], *settings: str) -> None:
    """Writes the file, with the machine, the names of models and tasks, and some of the settings."""
    if not args.json:
        return
    models = {key: Path(value).name for key in ("target", "draft") if (value := getattr(args, key))}
    facts = {"tasks": [item.split("=")[0] for item in args.data]} | {key: getattr(args, key) for key in settings}
    write_json(args.json, {"machine": describe_machine("cpu"), **models, **facts, **figures})

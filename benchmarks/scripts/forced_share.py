"""How many tokens of JSON answers a schema forces, and what drafting them saves, with and without optional whitespace.

    python benchmarks/scripts/forced_share.py --json benchmarks/FILE.json

All drafters answer a task after each other, greedily, another one first each time, with their default draft lengths.
`forced_rounds` are exact for drafts of at most K tokens: under the match rule drafts change no token, so they can be
compared with the answer of plain decoding.
"""

from __future__ import annotations

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import paradraft
from paradraft.bench.report.summary import write_json
from paradraft.engine.answers import Result
from paradraft.engine.engine import Engine
from paradraft.environment import describe_machine
from paradraft.sampling_params import Sampling
from paradraft.serve.grammar import Grammar, Grammars

FOLDER = Path(__file__).parents[1]
WHITESPACE = {"flexible": False, "compact": True}
PLAIN = "none"


def grammar_of(task: dict[str, Any], whitespace: str, prompt: int, grammars: Grammars) -> Grammar:
    """The processor of a new answer to a prompt of `prompt` tokens."""
    is_compact = WHITESPACE[whitespace]
    matcher = grammars.matcher(task["schema"], is_compact=is_compact)
    return grammars.grammar(matcher, prompt=prompt, is_compact=is_compact)


def counts(answer: list[int], grammar: Grammar, vocab_size: int, k: int) -> dict[str, int]:
    """Counts of an answer's tokens, of forced ones, of those without an alternative, and of rounds with drafts of K."""
    places = range(len(answer))
    forced = sum(grammar.forced(answer[:place], 1) == [answer[place]] for place in places)
    single = sum(int(np.sum(~grammar.forbidden(answer[:place], vocab_size))) == 1 for place in places)
    rounds = done = 0
    while done < len(answer):
        pairs = zip(grammar.forced(answer[:done], k), answer[done:-1], strict=False)
        done += 1 + len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        rounds += 1
    return {"tokens": len(answer), "forced": forced, "single": single, "forced_rounds": rounds}


def summary(answers: list[Result], plain: list[Result]) -> dict[str, Any]:
    """Of a drafter, prompts included."""
    seconds = [answer.stats.total_s for answer in answers]
    after_prompts, plain_after_prompts = (
        sum(answer.stats.total_s - answer.stats.prefill_s for answer in each) for each in (answers, plain)
    )
    tokens = sum(len(answer.tokens) for answer in answers)
    return {
        "seconds": sum(seconds),
        "speedup": sum(answer.stats.total_s for answer in plain) / sum(seconds),
        "speedup_after_prompts": plain_after_prompts / after_prompts,
        "rounds": sum(answer.stats.rounds for answer in answers),
        "acceptance_length": tokens / sum(answer.stats.rounds for answer in answers),
        "draft_s": sum(answer.stats.draft_s for answer in answers),
        "prefill_s": sum(answer.stats.prefill_s for answer in answers),
        "same_answers": sum(one.tokens == other.tokens for one, other in zip(answers, plain, strict=True)),
        "answer_seconds": seconds,
    }


def measured(
    tasks: list[dict[str, Any]], engines: dict[str, Engine], whitespace: str, most: int, k: int
) -> dict[str, Any]:
    """Figures of all drafters."""
    target = engines[PLAIN].target
    grammars = Grammars(target.facts)
    answers: dict[str, list[Result]] = {name: [] for name in engines}
    shares: dict[str, int] = {}
    for number, task in enumerate(track(tasks, whitespace)):
        prompt = engines[PLAIN].chat_tokens(task["messages"])
        first = number % len(engines)
        for name in [*engines][first:] + [*engines][:first]:
            sampling = Sampling(processors=[grammar_of(task, whitespace, len(prompt), grammars)])
            answers[name].append(engines[name].generate(prompt, max_new_tokens=most, sampling=sampling))
        grammar = grammar_of(task, whitespace, len(prompt), grammars)
        for key, value in counts(answers[PLAIN][-1].tokens, grammar, target.vocab_size, k).items():
            shares[key] = shares.get(key, 0) + value
    return {
        **shares,
        "forced_share": shares["forced"] / shares["tokens"],
        "single_share": shares["single"] / shares["tokens"],
        "tokens_per_forced_round": shares["tokens"] / shares["forced_rounds"],
        "drafters": {name: summary(each, answers[PLAIN]) for name, each in answers.items()},
        "texts": [answer.text for answer in answers[PLAIN]],
    }


def main() -> None:
    """Reads the options, measures, prints a table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="build/real/qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf")
    parser.add_argument("--tasks", type=Path, default=FOLDER / "prompts" / "json.jsonl")
    parser.add_argument("--number", type=int, help="of tasks; all by default")
    parser.add_argument("--drafters", default="forced", help="beside none, with commas")
    parser.add_argument("--tokens", type=int, default=120, help="most of an answer")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    given = parser.parse_args()
    tasks = [json.loads(line) for line in given.tasks.read_text(encoding="utf-8").splitlines()][: given.number]
    engines = {
        name: paradraft.load(given.target, drafter=name, k=given.k) for name in (PLAIN, *given.drafters.split(","))
    }
    found = {name: measured(tasks, engines, name, given.tokens, given.k) for name in WHITESPACE}
    for name, one in found.items():
        print(
            f"{name}: {one['tokens']} tokens, forced {one['forced_share']:.1%}, without an alternative "
            f"{one['single_share']:.1%}, {one['tokens_per_forced_round']:.2f} tokens per round if drafted"
        )
        for drafter, of in one["drafters"].items():
            print(
                f"  {drafter:14} {of['seconds']:6.1f} s, {of['speedup']:.2f}x, after prompts "
                f"{of['speedup_after_prompts']:.2f}x, {of['rounds']} rounds, "
                f"{of['same_answers']} of {len(tasks)} answers as without"
            )
    if given.json:
        settings = {"target": given.target, "tasks": len(tasks), "k": given.k, "most_tokens": given.tokens}
        write_json(given.json, {"machine": describe_machine("cpu"), **settings, "whitespace": found})


if __name__ == "__main__":
    main()

"""What a new engine's first answer is worth by how many tokens are drafted, while nothing is known of the machine.

    python benchmarks/scripts/first_answers.py --drafter pard --prompts FILE.jsonl --json FILE.json
    python benchmarks/scripts/first_answers.py --drafter pard --prompts FILE.jsonl --against OTHER_CHECKOUT --loads 0,2

Each answer is that of an engine that was just loaded. All settings, each in a process, answer a prompt after each
other, another one first each time, so that they meet the same machine; a turn is run once for each number of other
programs that compute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from busy_machine import busy
from rich.progress import track

HARDLY = 1.15
"""Tokens a pass below which an engine has hardly drafted."""


def work(target: str, drafter: str, draft: str | None, k: int | None, tokens: int) -> None:
    """A worker: answers each line of its input, `[lengths, prompt]`, with a new engine, and prints what that took."""
    import paradraft

    print("ready", flush=True)
    for line in sys.stdin:
        lengths, prompt = json.loads(line)
        drafts: dict[str, Any] = {"drafter": drafter, "draft": draft, "lengths": lengths}
        engine = paradraft.load(
            target, **({"drafter": "none"} if lengths == "none" else drafts | ({"k": k} if k else {}))
        )
        (answer,) = engine.generate([prompt], max_new_tokens=tokens)
        stats = answer.stats
        seconds = stats.prefill_s + stats.draft_s + stats.verify_s + stats.other_s
        print(json.dumps({"tokens": len(answer.tokens), "passes": stats.rounds, "seconds": seconds}), flush=True)


class Worker:
    """A worker as its owner sees it, whose paradraft is that of a checkout."""

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments],
            env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def answer(self, lengths: str, prompt: str) -> dict[str, Any]:
        """Of a new engine."""
        assert self._process.stdin is not None
        print(json.dumps([lengths, prompt]), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._read())
        return answer

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker has failed; its error is above")
        return line

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()


def summary(answers: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one setting: its speed, that of its slowest answer beside no drafter, and how many answers had few drafts."""
    tokens = sum(answer["tokens"] for answer in answers)
    beside = [one["seconds"] / other["seconds"] for one, other in zip(plain, answers, strict=True)]
    return {
        "tokens_per_s": tokens / sum(answer["seconds"] for answer in answers),
        "tokens_a_pass": tokens / sum(answer["passes"] for answer in answers),
        "slowest_beside_none": min(beside),
        "hardly_drafted": sum(answer["tokens"] < HARDLY * answer["passes"] for answer in answers),
        "answers": answers,
    }


def main() -> None:
    """Reads the options, measures, prints a table and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--k", type=int)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument(
        "--prompts", type=Path, default=Path("examples/prompts.jsonl"), help="JSON lines with a field prompt"
    )
    parser.add_argument("--number", type=int, default=12, help="of prompts")
    parser.add_argument("--loads", default="0", help="numbers of other programs, with commas")
    parser.add_argument("--against", type=Path, help="another checkout whose expected lengths are measured too")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.target, given.drafter, given.draft, given.k, given.tokens)
        return
    from paradraft.bench.summary import write_json
    from paradraft.environment import describe_machine

    names = ("target", "drafter", "draft", "k", "tokens")
    settings = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    here = Path(__file__).parents[2]
    asked = {lengths: (Worker(here, arguments), lengths) for lengths in ("none", "fixed", "expected")}
    if given.against:
        asked["expected, other checkout"] = Worker(given.against, arguments), "expected"
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()[: given.number]]
    for worker, lengths in asked.values():
        worker.answer(lengths, prompts[0])
    loads: dict[str, Any] = {}
    for load in given.loads.split(","):
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
        for number, prompt in enumerate(track(prompts, f"{load} other programs")):
            first = number % len(asked)
            with busy(int(load)):
                for name in [*asked][first:] + [*asked][:first]:
                    worker, lengths = asked[name]
                    answers[name].append(worker.answer(lengths, prompt))
        loads[load] = {name: summary(of, answers["none"]) for name, of in answers.items()}
        print(f"{load} other programs:")
        for name, of in loads[load].items():
            print(
                f"  {name:25} {of['tokens_per_s']:6.0f} tokens/s, {of['tokens_a_pass']:.2f} a pass; slowest answer "
                f"{of['slowest_beside_none']:.2f} of none; {of['hardly_drafted']} of {len(prompts)} hardly drafted"
            )
    for worker, _ in asked.values():
        worker.end()
    if given.json:
        write_json(given.json, {"machine": describe_machine("cpu"), **settings, "loads": loads})


if __name__ == "__main__":
    main()

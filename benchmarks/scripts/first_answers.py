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
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import track
from worker import Worker

HARDLY = 1.15
"""Tokens a pass below which an engine has hardly drafted."""


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """As many programs that compute while the body runs."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


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
    from paradraft.bench.report.summary import write_json
    from paradraft.environment import describe_machine

    names = ("target", "drafter", "draft", "k", "tokens")
    settings = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    here = Path(__file__).resolve().parents[2] / "src"
    asked = {lengths: (Worker(__file__, here, settings), lengths) for lengths in ("none", "fixed", "expected")}
    if given.against:
        asked["expected, other checkout"] = Worker(__file__, given.against / "src", settings), "expected"
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()[: given.number]]
    for worker, lengths in asked.values():
        worker.ask(json.dumps([lengths, prompts[0]]))
    loads: dict[str, Any] = {}
    for load in given.loads.split(","):
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
        for number, prompt in enumerate(track(prompts, f"{load} other programs")):
            first = number % len(asked)
            with busy(int(load)):
                for name in [*asked][first:] + [*asked][:first]:
                    worker, lengths = asked[name]
                    answers[name].append(json.loads(worker.ask(json.dumps([lengths, prompt]))))
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

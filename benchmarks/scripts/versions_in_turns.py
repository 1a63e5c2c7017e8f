"""The parts of PARD's answers in several versions of the code, each in a process of its own, which take turns answer by
answer: so all of them meet the same states of a shared machine.

git worktree add build/before COMMIT
python benchmarks/scripts/versions_in_turns.py --trees build/before,. --methods int8:8,int4:4 --json FILE.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from round_parts import DRAFT, PROMPT_TOKENS, PROMPTS, RATES, TARGET, Case, Parts, medians

from paradraft.bench.report.summary import write_json
from paradraft.bench.setup import random_prompts
from paradraft.environment import describe_machine


def answer_all(method: str) -> None:
    """In the process of one version: answers the prompts whose numbers it reads, and writes their parts."""
    dtype, _, k = method.partition(":")
    case, prompts = Case(dtype, int(k)), random_prompts(TARGET, PROMPTS, PROMPT_TOKENS)
    case.turn(prompts[0])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(case.turn(prompts[int(line)])), flush=True)


class Version:
    """A version of the code, which answers.

    Args:
        tree: its folder.
        method: dtype and length of drafts.
    """

    def __init__(self, tree: Path, method: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--answer", method],
            env={**os.environ, "PYTHONPATH": str(tree.resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turns: list[dict[str, Parts]] = []
        self._read()

    def turn(self, prompt: int) -> None:
        """Answers a prompt by each method."""
        assert self._process.stdin is not None
        print(prompt, file=self._process.stdin, flush=True)
        self.turns.append(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("a version has ended; its reason is above")
        return line

    def end(self) -> None:
        """Ends its process."""
        self._process.communicate()


def compared(trees: list[Path], method: str, turns: int) -> dict[str, Any]:
    """Medians of all versions, and the median of the speedups of single turns."""
    versions = [Version(tree, method) for tree in trees]
    for number in range(turns):
        for version in versions if number % 2 else reversed(versions):
            version.turn(number % PROMPTS)
    for version in versions:
        version.end()
    return {
        "ms": [medians(version.turns) for version in versions],
        "speedup": [
            statistics.median(turn["ar"]["total"] / turn["pard"]["total"] for turn in version.turns)
            for version in versions
        ],
        "first_over_last": {
            name: statistics.median(
                first[name]["total"] / last[name]["total"]
                for first, last in zip(versions[0].turns, versions[-1].turns, strict=True)
            )
            for name in ("ar", "pard")
        },
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer", metavar="METHOD", help=argparse.SUPPRESS)
    parser.add_argument("--trees", default=".", help="folders of versions, oldest first")
    parser.add_argument("--methods", default="int8:8,int4:4", help="dtypes, and how many tokens are drafted in each")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.answer:
        return answer_all(given.answer)
    trees = [Path(tree) for tree in given.trees.split(",")]
    commits = [
        subprocess.run(
            ["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for tree in trees
    ]
    found = {method: compared(trees, method, given.turns) for method in given.methods.split(",")}
    for method, result in found.items():
        print(method, {key: value for key, value in result.items() if key != "ms"})
        for commit, parts in zip(commits, result["ms"], strict=True):
            for name, times in parts.items():
                print("   ", commit, name, *(f"{part} {value:.1f}" for part, value in times.items()))
    if given.json:
        setup = {"target": TARGET, "draft": DRAFT, "rates": RATES, "commits": commits, "turns": given.turns}
        write_json(given.json, setup | {"cases": found, "machine": describe_machine("cpu")})


if __name__ == "__main__":
    main()

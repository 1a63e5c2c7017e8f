"""Runs a table of the PARD paper again: one `paradraft bench` for each row, and one Markdown table of them all.

    python recipes/tables/run.py recipes/tables/table-1.yaml --out build/table-1 --dry-run
    python recipes/tables/run.py recipes/tables/table-1.yaml --out build/table-1
    python recipes/tables/run.py recipes/tables/table-1.yaml --out build/try --models pocket --num-prompts 2 \
        --max-new-tokens 32 --no-compile --task-data humaneval=FILE.jsonl --task-data … (one for each task)

Each row's result is a JSON file in the folder; what is there is not run again, so the same command goes on
where it stopped. A row that fails is named in the end, and the others run. Of several settings of a method
the one with the highest mean speed stands in the table, with its name.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paradraft.environment import without_folder

Row = dict[str, Any]
TASK_NAMES = {"math500": "MATH500", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
POCKET: Row = {"name": "pocket", "target": "pocket"}
DRAFT_OF = {
    "autoregressive": "draft", "vllm-draft": "draft", "llama-cpp-draft": "draft", "pard": "pard", "vllm-pard": "pard",
}  # fmt: skip
"""Which of a row's models a method drafts with."""


def command_of(table: dict[str, Any], row: Row, args: argparse.Namespace, file: Path) -> list[str]:
    """The arguments of `paradraft` that measure a row."""
    specs = [_with_draft(spec, row) for settings in table["methods"].values() for spec in settings]
    is_pocket = args.models == "pocket"
    device = args.device or ("cpu" if is_pocket else table["device"])
    dtype = args.dtype or ("float32" if is_pocket else "bfloat16")
    command = ["bench", "--target", row["target"], "--task", ",".join(table["tasks"]), "--methods", ",".join(specs)]
    command += ["--temperature", "0", "--batch-size", "1", "--device", device, "--dtype", dtype]
    command += ["--runs", str(args.runs), "--json", str(file)]
    if "system" in row:
        command += ["--system", row["system"]]
    for option, value in (("--num-prompts", args.num_prompts), ("--max-new-tokens", args.max_new_tokens)):
        command += [] if value is None else [option, str(value)]
    for data in args.task_data:
        command += ["--task-data", data]
    return command + ([] if args.compile else ["--no-compile"])


def _with_draft(spec: str, row: Row) -> str:
    model = row.get(DRAFT_OF.get(spec.partition(":")[0], ""))
    return f"{spec}:draft={model}" if model else spec


def best_of(table: dict[str, Any], row: Row, result: dict[str, Any]) -> dict[str, tuple[str, list[float]]]:
    """For each method of the table its fastest settings, and their tokens per second in each task.

    Args:
        table: the recipe.
        row: one of its rows.
        result: what `paradraft bench --json` wrote for it.
    """
    tasks = result["tasks"] if "tasks" in result else {result["task"]["name"]: result}
    found = {}
    for method, settings in table["methods"].items():
        speeds = {}
        for spec in settings:
            figures = [tasks[task]["methods"].get(_with_draft(spec, row)) for task in table["tasks"]]
            if all(figures):
                speeds[spec] = [float(one["tokens_per_s"]["median"]) for one in figures]
        if speeds:  # vLLM's are skipped where it is not installed
            best = max(speeds, key=lambda spec: sum(speeds[spec]))
            found[method] = (best, speeds[best])
    return found


def markdown(table: dict[str, Any], results: list[tuple[Row, dict[str, Any] | None]]) -> str:
    """The table in the paper's layout; the paper's own speedups stand in brackets."""
    columns, baseline = table["columns"], table.get("baseline", "AR+")
    names = [TASK_NAMES.get(task, task) for task in table["tasks"]]
    names += ["Average"] * (len(names) > 1)
    head = ["target", "method", "settings", *(f"{name}, {column}" for name in names for column in columns)]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
    for row, result in results:
        best = {} if result is None else best_of(table, row, result)
        for method in table["methods"]:
            if method not in best:
                lines.append([row["name"], method, "not run", *["-"] * (len(head) - 3)])
                continue
            spec, speeds = best[method]
            base = best[baseline][1] if baseline in best else None
            paper = row.get("paper", {}).get(method)
            cells = [row["name"], method, spec.partition(":")[2] or "-"]
            for place in range(len(speeds)):
                cells += _cells(columns, speeds[place], base[place] if base else None, paper[place] if paper else None)
            if len(speeds) > 1:
                mean = statistics.mean(base) if base else None
                cells += _cells(columns, statistics.mean(speeds), mean, None)
            lines.append(cells)
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    ours = [result for _, result in results if result is not None]
    return f"# {table['title']}\n\n{body}\n\n{_notes(baseline, ours)}"


def _cells(columns: list[str], speed: float, base: float | None, paper: float | None) -> list[str]:
    speedup = "-" if base is None else f"{speed / base:.2f}x"
    if paper is not None:
        speedup += f" ({paper:.2f}x)"
    return [{"tokens/s": f"{speed:.1f}", "speedup": speedup}[column] for column in columns]


def _notes(baseline: str, results: list[dict[str, Any]]) -> str:
    """What one has to know to read the numbers."""
    notes = f"Speedup against {baseline}; in brackets the paper's. Average: mean speeds, and their ratio."
    differing = 0
    for result in results:
        for one in result.get("tasks", {"": result}).values():
            differing += sum(figures["identical_to_ar"] is False for figures in one["methods"].values())
    if differing:
        notes += f" In {differing} of the runs some answers differ from AR+'s (`paradraft audit` says why)."
    if results:
        one = next(iter(results[0].get("tasks", {"": results[0]}).values()))
        machine, arguments = one["machine"], one["arguments"]
        notes += (
            f" First row: {machine.get('gpu') or machine['cpu']}, {machine['date'][:10]}, {arguments['num_prompts']} "
            f"prompts x {arguments['max_new_tokens']} tokens of the first task, {arguments['runs']} run(s)."
        )
    return notes + "\n"


def read_row(file: Path, command: list[str]) -> dict[str, Any] | None:
    """A row's result, if there is one already.

    Raises:
        SystemExit: it was made by another command, so the table would mix settings.
    """
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    one = next(iter(result.get("tasks", {"": result}).values()))
    made = one["machine"]["command"]
    if made[-len(command) :] != list(map(without_folder, command)):
        raise SystemExit(f"{file} was made by another command: {shlex.join(made)}; remove it, or choose another --out")
    return result


def run_paradraft(command: list[str]) -> int:
    """Runs `paradraft` in a process of its own, which gives all memory back; its exit code."""
    code = "from paradraft.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *command]).returncode


def main(arguments: list[str] | None = None, run: Callable[[list[str]], int] = run_paradraft) -> None:
    """Runs the rows that have no result yet, and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="recipes/tables/table-….yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument(
        "--models", choices=("paper", "pocket"), default="paper", help="pocket: the shipped family, on CPU"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these rows only, as in --only 'L3.1 8B'")
    parser.add_argument("--device", help="instead of the recipe's")
    parser.add_argument("--dtype", help="by default bfloat16, of pocket float32")
    parser.add_argument("--num-prompts", type=int, help="questions of each task")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--task-data", action="append", default=[], metavar="NAME=FILE", help="a local copy of a task")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(arguments)
    table = yaml.safe_load(args.table.read_text(encoding="utf-8"))
    rows: list[Row] = [POCKET] if args.models == "pocket" else table["rows"]
    if args.only:
        if unknown := set(args.only) - {row["name"] for row in rows}:
            raise SystemExit(f"no row {sorted(unknown)}: use some of {[row['name'] for row in rows]}")
        rows = [row for row in rows if row["name"] in args.only]
    files = {row["name"]: args.out / (re.sub(r"[^\w.]+", "-", row["name"].lower()) + ".json") for row in rows}
    commands = {row["name"]: command_of(table, row, args, files[row["name"]]) for row in rows}
    if args.dry_run:
        for command in commands.values():
            print(shlex.join(["paradraft", *command]))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = {name: read_row(files[name], command) for name, command in commands.items()}
    failed = []
    for name, command in commands.items():
        if results[name] is None:
            print(f"--- {name}: {shlex.join(['paradraft', *command])}", flush=True)
            if run(command) != 0:
                failed.append(name)
            results[name] = read_row(files[name], command)
        text = markdown(table, [(row, results[row["name"]]) for row in rows])
        (args.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command tries them again")


if __name__ == "__main__":
    main()

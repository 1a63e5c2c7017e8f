"""Holds the simulator of drafting ahead against benchmarks, and against the PEARL paper's tables.

`python benchmarks/scripts/pearl_simulated.py --bench FILE.json … --json FILE.json`. Each file is of `paradraft bench`
with plain decoding, VSD or PARD in turn on the CPUs of one side (`target_cpus=`), and drafting ahead on those of both.
The times of passes and acceptance come from the methods in turn on one side's CPUs alone. How much slower passes are
beside the other side's, and what a round takes besides, come from the first method of the file that drafts ahead with
a drafter; the others are predicted.

The paper (Liu et al. 2024) gives speeds of single models (Table 10) and speedups (Table 1). Acceptance is what makes
the best VSD of the simulator as fast as its VSD; PEARL's speedup is then predicted with γ = round(c), as there.

`--nano-pearl FILE` is docs/bench_summary.md of https://github.com/smart-lty/nano-PEARL (commit cacb75d), whose authors
measured their engine on several GPUs: throughput with and without PEARL, and mean accepted tokens (MAT). A chance of
1 - 1 / MAT makes runs of accepted tokens as long. The speed of the draft model is not told, so it is what gives the
speedup on GSM8K, for each pair and batch; those on the other tasks are then predicted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paradraft.bench.report.summary import write_json
from paradraft.bench.synthetic import chances_of
from paradraft.environment import describe_machine
from paradraft.plan.simulate import RoundTimes, speed_ahead, speed_in_turn

PAIRS = {  # draft tokens/s, target tokens/s (Table 10), VSD, PEARL against AR (Table 1, HumanEval)
    "CodeLlama 7&34B": (49.34, 18.58, 1.76, 2.48),
    "CodeLlama 7&70B": (49.34, 9.20, 3.03, 4.43),
    "Llama 2 7&70B": (49.94, 9.22, 2.35, 3.29),
    "Llama 3.1 8&70B": (44.37, 9.00, 2.60, 3.87),
    "DeepSeek 1.3&33B": (63.20, 17.37, 2.32, 3.48),
    "DeepSeek 6.7&33B": (50.05, 17.37, 1.94, 2.79),
    "Llama 2 7&70B, GSM8K (Table 2)": (49.94, 9.22, 2.48, 3.82),
    "Llama 2 7&70B, MT-bench (Table 3)": (49.94, 9.22, 1.89, 2.64),
}


def of_paper(draft: float, target: float, vsd: float, pearl: float) -> dict[str, float]:
    """A pair of the paper beside what the simulator says of it."""
    times = RoundTimes(target_s=1 / target, draft_s=1 / draft)

    def best_vsd(chance: float) -> float:
        return max(speed_in_turn(times, [chance] * 32, k) for k in range(1, 33)) / target

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if best_vsd(middle) < vsd else (low, middle)
    gamma = round(draft / target)
    predicted = speed_ahead(times, [low] * 32, gamma) / target
    return {
        "vsd_published": vsd, "acceptance": low, "gamma": gamma, "pearl_predicted": predicted, "pearl_published": pearl,
        "error": predicted / pearl - 1,
    }  # fmt: skip


def of_nano_pearl(table: str) -> list[dict[str, Any]]:
    """Pairs, batch sizes and tasks that the authors of nano-PEARL measured, beside what the simulator says of them.

    Args:
        table: in Markdown.
    """
    measured: dict[tuple[str, str, int], dict[str, dict[str, tuple[float, float]]]] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[2].isdecimal():
            draft, target = (name.rpartition("--")[2] for name in cells[:2])
            of_task = measured.setdefault((draft, target, int(cells[2])), {}).setdefault(cells[3], {})
            of_task[cells[4]] = float(cells[7]), float(cells[8])
    found = []
    for (draft, target, batch), tasks in measured.items():
        low, high = 0.0, 1.0  # time of the draft model against the target's
        while high - low > 1e-6:
            middle = (low + high) / 2
            is_slower = _ahead(middle, tasks["GSM8K"]["PEARL"][1])[0] < _speedup(tasks["GSM8K"])
            low, high = (low, middle) if is_slower else (middle, high)
        for task in sorted(tasks.keys() - {"GSM8K"}):
            predicted, gamma = _ahead(low, tasks[task]["PEARL"][1])
            published = _speedup(tasks[task])
            found.append({
                "draft": draft, "target": target, "batch": batch, "task": task, "target_to_draft": 1 / low,
                "gamma": gamma, "predicted": predicted, "published": published, "error": predicted / published - 1,
            })  # fmt: skip
    return found


def _speedup(task: dict[str, tuple[float, float]]) -> float:
    return task["PEARL"][0] / task["AR"][0]


def _ahead(draft: float, accepted: float) -> tuple[float, int]:
    """The best speedup of drafting ahead and its γ, if a drafted token takes `draft` passes of the target and runs of
    `accepted` tokens are accepted."""
    times, chances = RoundTimes(target_s=1.0, draft_s=draft), [1 - 1 / accepted] * 64
    return max((speed_ahead(times, chances, gamma), gamma) for gamma in range(2, 33))


def of_rounds(figures: dict[str, Any]) -> tuple[float, float, float]:
    """Seconds of drafting, of verification and of the rest of a mean round."""
    rounds = figures["tokens"] / figures["acceptance_length"]
    return tuple(figures[name] / rounds for name in ("draft_s", "verify_s", "other_s"))


def of_file(file: Path) -> list[dict[str, Any]]:
    """The methods of a file that draft ahead in two processes, predicted from those in turn on one side."""
    methods = json.loads(file.read_text(encoding="utf-8"))["methods"]
    one_side = {spec: one for spec, one in methods.items() if one["target_cpus"] and not one["gamma"]}
    plain = next(one for one in one_side.values() if one["method"] == "ar")
    found = []
    calibrated: dict[str, tuple[float, float]] = {}
    for spec, measured in methods.items():
        alike = [one for one in one_side.values() if one["method"] == measured["method"] and one["batch"] == 1]
        if not measured["gamma"] or not measured["draft_cpus"] or not alike or measured["batch"] != 1:
            continue
        in_turn = max(alike, key=lambda one: one["k"])
        (_, target_s, _), (draft_s, verify_s, rest_s) = of_rounds(plain), of_rounds(in_turn)
        is_parallel = measured["method"] == "pard"
        token_s = draft_s if is_parallel else draft_s / in_turn["k"]
        contention, ahead_s = calibrated.get(measured["method"], (1.0, rest_s))
        times = RoundTimes(
            target_s=target_s, verify_s=verify_s, rest_s=ahead_s, draft_s=token_s, contention=contention
        )  # fmt: skip
        rates = measured["synthetic_acceptance"] or in_turn["accepted_share_of_rounds"]
        chances = chances_of(rates)
        chances += [chances[-1]] * max(measured["gamma"] - len(chances), 0)
        prefill_share = in_turn["prefill_s"] / in_turn["tokens"]
        speed = speed_ahead(times, chances, measured["gamma"], is_parallel=is_parallel, overlap=measured["overlap"])
        predicted = 1 / (1 / speed + prefill_share)
        seen = measured["tokens_per_s"]["median"]
        if measured["method"] not in calibrated:
            sides = measured["sides"]["median_ms"]
            contention = 1e-3 * sides["draft"] / times.drafting_s(measured["gamma"], is_parallel=is_parallel)
            calibrated[measured["method"]] = max(contention, 1.0), 1e-3 * sides["rest"]
            continue
        found.append({
            "file": file.name, "method": spec, "predicted": predicted, "measured": seen, "error": predicted / seen - 1,
        })  # fmt: skip
    return found


def main() -> None:
    """Compares and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, nargs="*", default=[], help="files of `paradraft bench`")
    parser.add_argument("--nano-pearl", type=Path, help="docs/bench_summary.md of nano-PEARL")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    measured = [one for file in args.bench for one in of_file(file)]
    for one in measured:
        print(f"{one['method']}: {one['predicted']:.1f} predicted, {one['measured']:.1f} measured, {one['error']:+.0%}")
    paper = {name: of_paper(*pair) for name, pair in PAIRS.items()}
    for name, one in paper.items():
        print(f"{name}: {one['pearl_predicted']:.2f} predicted, {one['pearl_published']:.2f} published")
    nano = [] if args.nano_pearl is None else of_nano_pearl(args.nano_pearl.read_text(encoding="utf-8"))
    for one in nano:
        name = f"{one['draft']} for {one['target']}, batch {one['batch']}, {one['task']}"
        print(f"{name}: {one['predicted']:.2f} predicted, {one['published']:.2f} published, {one['error']:+.0%}")
    figures = {"machine": describe_machine("cpu"), "measured": measured, "paper": paper, "nano_pearl": nano}
    write_json(args.json, figures)


if __name__ == "__main__":
    main()

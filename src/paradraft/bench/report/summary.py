"""Summarizes a benchmark as a table and a JSON file, with the mean of several tasks, as in the PARD paper."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from paradraft.bench.baselines import ASSISTED, HF, LOOKUP, PEERS, is_llama_cpp
from paradraft.bench.labels import LABELS, full_paths, labels
from paradraft.bench.latency import LATENCIES, TERMS, have_latencies, milliseconds
from paradraft.bench.report.folding import Column, FoldingTable, columns
from paradraft.bench.result_file import has_faster_baselines, mark, without_baseline
from paradraft.bench.spec import AR
from paradraft.bench.steadiness import unsteady_runs
from paradraft.data.prompt_source import counted
from paradraft.drafters import traits_of
from paradraft.files import write_output
from paradraft.models.names import short_name
from paradraft.models.runtime import QUANTIZED
from paradraft.wording import number_of

MEAN_CAPTION = (
    "tokens/s, and speedup against AR+ of the same dtype, of each task · mean: mean tokens/s, and its ratio to AR+'s"
)
OWN_SAMPLING = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings that peers do not have, with their neutral values; titles name other values."""


def mean_of(tasks: dict[str, Summary]) -> Summary:
    """For each method the mean of its figures over tasks.

    As in the paper's column "Average" a speedup is the ratio of two mean speeds, not the mean of the ratios. The
    baseline's speed in each task is the method's speed over its speedup there.
    """
    first = next(iter(tasks.values()))
    return {
        spec: {
            "method": figures["method"],
            "tokens_per_s": statistics.mean(_speed(summary[spec]) for summary in tasks.values()),
            "speedup_vs_hf": _ratio([summary[spec] for summary in tasks.values()], "speedup_vs_hf"),
            "speedup_vs_ar": _ratio([summary[spec] for summary in tasks.values()], "speedup_vs_ar"),
            "speedup_vs_fastest_ar": _ratio([summary[spec] for summary in tasks.values()], "speedup_vs_fastest_ar"),
            "acceptance_length": _mean([summary[spec]["acceptance_length"] for summary in tasks.values()]),
            "acceptance_length_first_32": _mean(
                [summary[spec]["acceptance_length_first_32"] for summary in tasks.values()]
            ),
            "identical_to_ar": _all([summary[spec]["identical_to_ar"] for summary in tasks.values()]),
        }
        for spec, figures in first.items()
    }


def mean_table(tasks: dict[str, Summary], mean: Summary, title: str) -> FoldingTable:
    """One line per method: its speed and speedup in each task, and the mean."""
    result, names = FoldingTable(title, columns("method", *tasks, "mean"), legend=[MEAN_CAPTION]), labels(mean)
    for spec, figures in mean.items():
        cells = [_cell(_speed(summary[spec]), summary[spec]["speedup_vs_ar"]) for summary in tasks.values()]
        result.add_row(names[spec], *cells, _cell(figures["tokens_per_s"], figures["speedup_vs_ar"]))
    return result


def _cell(speed: float, speedup: float | None) -> str:
    return f"{speed:.1f}" + ("" if speedup is None else f" {speedup:.2f}x")


def _speed(figures: dict[str, Any]) -> float:
    return float(figures["tokens_per_s"]["median"])


def _ratio(tasks: list[dict[str, Any]], key: str) -> float | None:
    if any(figures[key] is None for figures in tasks):
        return None
    return sum(map(_speed, tasks)) / sum(_speed(figures) / figures[key] for figures in tasks)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def _all(values: list[bool | None]) -> bool | None:
    return None if any(value is None for value in values) else all(values)


Summary = dict[str, dict[str, Any]]
DRAWN = "SYNTHETIC ACCEPTANCE: verdicts are drawn, texts are not the target's"


def table(summary: Summary, title: str) -> FoldingTable:
    """One line per method: speed, acceptance length, and the shares of drafting, verifying and the rest of its time,
    and of right answers where these are marked.

    The speed against `generate` has a column where that ran, and the speed against the fastest AR+ where the run has
    AR+ in several dtypes.
    """
    marks, shown = {spec: mark(spec, summary) for spec in summary}, labels(summary)
    has_several = has_faster_baselines(summary)
    has_hf = any(figures["speedup_vs_hf"] is not None for figures in summary.values())
    is_drawn = any(figures.get("synthetic_acceptance") for figures in summary.values())
    ratios = [*["vs AR"] * has_hf, "vs AR+", *["vs **"] * has_several]
    names = ["tok/s", *ratios, "len", "1-32", "draft", "verify", "rest", "floor", "same"]
    has_right = any(figures.get("right") is not None for figures in summary.values())
    names += ["right"] * has_right
    result = FoldingTable(
        title, columns("method", *names), legend=[DRAWN] * is_drawn + refusals(summary) + [legend(summary)]
    )
    for spec, figures in summary.items():
        parts = [_share(figures, key) for key in ("draft_s", "verify_s")]
        parts.append(_share(figures, "prefill_s", "other_s"))
        result.add_row(
            f"{shown[spec]} {marks[spec]}".rstrip(),
            f"{figures['tokens_per_s']['median']:.0f}",
            *[_times(figures["speedup_vs_hf"])] * has_hf,
            _times(figures["speedup_vs_ar"]),
            *[_times(figures["speedup_vs_fastest_ar"])] * has_several,
            _number(figures["acceptance_length"]),
            _number(figures["acceptance_length_first_32"]),
            *parts,
            "-" if figures.get("share_of_floor") is None else f"{figures['share_of_floor']:.0%}",
            {True: "yes", False: "no", None: "-"}[figures["identical_to_ar"]],
            *["-" if figures.get("right") is None else f"{figures['right']:.0%}"] * has_right,
        )
    return result


def refusals(summary: Summary) -> list[str]:
    """Models that ran in PyTorch because their passes in C++ were refused, each with its reasons."""
    lines = {
        f"SLOW: {name}: {reason}"
        for figures in summary.values()
        for name, reasons in figures.get("refusals", {}).items()
        for reason in reasons
    }
    return sorted(lines)


def legend(summary: Summary) -> str:
    """Explanations of the words that occur in a table; at most four lines of 80 characters."""
    kinds = {figures["method"] for figures in summary.values()}
    peers = [LABELS[name] for name in (HF, ASSISTED, LOOKUP) if name in kinds]

    def has(key: str) -> bool:
        return any(figures.get(key) is not None for figures in summary.values())

    marks = ["* baseline"] * has("baseline") + ["** fastest"] * has_faster_baselines(summary)
    words = {
        f"{', '.join(peers)}: generate of transformers": bool(peers),
        "AR+: ours, no drafter" + (f" ({', '.join(marks)})" if marks else ""): AR in kinds,
        **{f"{each.label}: ordinary draft model": True for each in map(traits_of, kinds) if each.drafts_one_by_one},
        "PEARL: drafts ahead": has("gamma"),
        "k: tokens drafted per round": any(":k=" in spec for spec in summary),
        "len: tokens per target pass, 1-32: of the first 32": has("acceptance_length"),
        "draft, verify, rest: of time": has("draft_s"),
        "floor: least possible time / time": has("share_of_floor"),
        "same: as AR+": has("identical_to_ar"),
        "right: of answers": has("right"),
    }
    return " · ".join(text for text, occurs in words.items() if occurs)


def latency_table(summary: Summary) -> FoldingTable | None:
    """One line per method: percentiles of TTFT, TPOT and ITL; None where no method has them."""
    if not have_latencies(summary):
        return None
    percentiles = [
        Column(name=f"{name} p50" if share == "p50" else share, long=f"{name} {share}")
        for name in LATENCIES.values()
        for share in ("p50", "p99")
    ]
    result, shown = FoldingTable("latency, ms", [*columns("method"), *percentiles], legend=[TERMS]), labels(summary)
    for spec, entry in summary.items():
        spreads = [entry.get(key) for key in LATENCIES]
        cells = ["-" if known is None else milliseconds(known[share]) for known in spreads for share in ("p50", "p99")]
        result.add_row(shown[spec], *cells)
    return result


def notes(summary: Summary) -> list[str]:
    """Remarks on a table, a line each.

    Paths that labels shorten, an unsteady machine, answers that repeat themselves, methods that do not pay, and missing
    baselines.
    """
    shares, shown = dict[str, list[str]](), labels(summary)
    for spec, figures in summary.items():
        shares.setdefault(f"{figures['distinct_4grams']:.0%}", []).append(shown[spec])
    usual = max(shares, key=lambda share: len(shares[share]))
    others = [f"{share} of {'; '.join(names)}" for share, names in shares.items() if share != usual]
    lines = full_paths(summary)
    lines += [unsteady] if (unsteady := unsteady_runs(summary)) is not None else []
    if (difference := _why_peers_differ(summary)) is not None:
        lines.append(difference)
    lines += [f"distinct 4-grams of the answers: {usual}" + (f" (but {', '.join(others)})" if others else "")]
    lines += [f"{shown[spec]}: {figures['advice']}" for spec, figures in summary.items() if figures.get("advice")]
    for lacking, specs in without_baseline(summary).items():
        names = "; ".join(shown[spec] for spec in specs)
        lines.append(f"no {lacking} in this run, so nothing stands under vs AR+ for: {names}")
    return lines


def _why_peers_differ(summary: Summary) -> str | None:
    """The reason why peers have other texts, if all methods of ours have those of AR+."""
    others = {spec: figures for spec, figures in summary.items() if figures["identical_to_ar"] is False}
    dtypes = {figures.get("dtype") for figures in others.values()} - {"float32", "float64"}
    if not others or not dtypes or any(figures["method"] not in PEERS for figures in others.values()):
        return None
    names, rounded = ", ".join(labels(summary)[spec] for spec in others), "/".join(sorted(map(str, dtypes)))
    line = f"same: no for {names}, which round {rounded} in another order; compare in float32"
    if any(is_llama_cpp(figures["method"]) and figures.get("dtype") in QUANTIZED for figures in others.values()):
        line += "; llama.cpp rounds weights to other numbers than we do, and activations to 8 bits"
    return line


def title_of(result: dict[str, Any]) -> str:
    """The model, prompts and settings of a result in one line; drawn verdicts are named first.

    >>> arguments = {"target": "pocket", "num_prompts": 2, "max_new_tokens": 8, "sampling": {"temperature": 0.0}}
    >>> title_of({"arguments": arguments})
    'pocket, 2 prompts × 8 tokens, greedy'
    """
    arguments = result["arguments"]
    temperature = arguments["sampling"]["temperature"]
    title = f"{result['task']['name']}: " if "task" in result else ""
    prompts = counted(arguments["num_prompts"], arguments.get("prompts"))
    title += f"{short_name(arguments['target'])}, {prompts} × {number_of(arguments['max_new_tokens'], 'token')}, "
    title += f"temperature {temperature:g}" if temperature else "greedy"
    for name, usual in OWN_SAMPLING.items():
        if (value := arguments["sampling"].get(name, usual)) != usual:
            title += f", {name} {value:g}"
    title += ", asked in a chat" * bool(arguments.get("chat"))
    return marked(title, arguments)


def marked(title: str, arguments: dict[str, Any]) -> str:
    """A title that begins with a mark if verdicts were drawn; title and arguments are those of a result."""
    rates = arguments.get("synthetic_acceptance")
    return title if rates is None else f"SYNTHETIC ACCEPTANCE {', '.join(f'{rate:.3g}' for rate in rates)}: {title}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(figures: dict[str, Any], *keys: str) -> str:
    if figures[keys[0]] is None:
        return "-"
    return f"{sum(figures[key] for key in keys) / figures['total_s']:.0%}"


def write_json(file: Path, report: dict[str, Any]) -> None:
    """Writes the whole report, each list of numbers in one line."""
    plain = json.loads(json.dumps(report))  # JSON knows no tuples, and no keys but strings
    write_output(file, (_indented(plain, "\n") + "\n").encode())


def _indented(value: Any, margin: str) -> str:
    """Like `json.dumps` with an indent of 1, but with lists of numbers in one line."""
    inside = margin + " "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key, ensure_ascii=False)}: {_indented(item, inside)}" for key, item in value.items()]
        return "{" + inside + f",{inside}".join(entries) + margin + "}"
    if isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
        return "[" + inside + f",{inside}".join(_indented(item, inside) for item in value) + margin + "]"
    return json.dumps(value, ensure_ascii=False)

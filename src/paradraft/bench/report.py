"""A benchmark's figures as a table and a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from paradraft.bench.audit import Report
from paradraft.bench.methods import settings_of
from paradraft.bench.speedups import has_faster_baselines, mark, without_baseline
from paradraft.output import write_output

Summary = dict[str, dict[str, Any]]

LABELS = {
    "hf": "AR", "ar": "AR+", "autoregressive": "VSD", "pard": "PARD", "ngram": "n-gram",
    "hf-assisted": "assisted", "hf-prompt-lookup": "lookup",
    "vllm": "vLLM", "vllm-draft": "vLLM VSD", "vllm-pard": "vLLM PARD", "vllm-ngram": "vLLM n-gram",
}  # fmt: skip
CAPTION = (
    "AR, assisted, lookup: generate of transformers · AR+: ours without a drafter · VSD: an ordinary draft model · "
    "vs AR: against the fastest AR · vs AR+: against AR+ of the same dtype and batch size, marked * · "
    "len: tokens per target pass · 1-32: the same over the first 32 tokens of each answer · "
    "draft, verify, rest: shares of the time · "
    "floor: least time that its passes can take here / time they took, both with prefill · same: the tokens of AR+"
)
FASTEST = "vs **: against the fastest AR+ with whole weights, marked **"
DRAWN = "SYNTHETIC ACCEPTANCE: verdicts are drawn, texts are not the target's"
_EVIDENT = ("dtype=", "draft=", "verify=", "lengths=")
"""Settings whose value says what it is."""


def table(summary: Summary, title: str) -> Table:
    """One line per method: speed, acceptance length, and the shares of drafting, verifying and the rest of its time.

    The speed against the fastest AR+ has a column where the run has AR+ in several dtypes.
    """
    marks = {spec: mark(spec, summary) for spec in summary}
    has_several = has_faster_baselines(summary)
    is_drawn = any(figures.get("synthetic_acceptance") for figures in summary.values())
    caption = " · ".join([DRAWN] * is_drawn + [CAPTION] + [FASTEST] * has_several)
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    names = ["tok/s", "vs AR", "vs AR+", *["vs **"] * has_several, "len", "1-32", "draft", "verify", "rest"]
    for name in ("method", *names, "floor", "same"):
        result.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for spec, figures in summary.items():
        parts = [_share(figures, key) for key in ("draft_s", "verify_s")]
        parts.append(_share(figures, "prefill_s", "other_s"))
        result.add_row(
            f"{label(spec, figures)} {marks[spec]}".rstrip(),
            f"{figures['tokens_per_s']['median']:.0f}",
            _times(figures["speedup_vs_hf"]),
            _times(figures["speedup_vs_ar"]),
            *[_times(figures["speedup_vs_fastest_ar"])] * has_several,
            _number(figures["acceptance_length"]),
            _number(figures["acceptance_length_first_32"]),
            *parts,
            "-" if figures.get("share_of_floor") is None else f"{figures['share_of_floor']:.0%}",
            {True: "yes", False: "no", None: "-"}[figures["identical_to_ar"]],
        )
    return result


def notes(summary: Summary) -> list[str]:
    """What has to be known to read a table, a line each: how far answers repeat themselves, and missing baselines."""
    shares: dict[str, list[str]] = {}
    for spec, figures in summary.items():
        shares.setdefault(f"{figures['distinct_4grams']:.0%}", []).append(label(spec, figures))
    usual = max(shares, key=lambda share: len(shares[share]))
    others = [f"{share} of {'; '.join(names)}" for share, names in shares.items() if share != usual]
    found = [f"distinct 4-grams of the answers: {usual}" + (f" (but {', '.join(others)})" if others else "")]
    for lacking, specs in without_baseline(summary).items():
        names = "; ".join(label(spec, summary[spec]) for spec in specs)
        found.append(f"no {lacking} in this run, so nothing stands under vs AR+ for: {names}")
    return found


def title_of(result: dict[str, Any]) -> str:
    """What was measured, in one line; of drawn verdicts it says so first.

    >>> arguments = {"target": "pocket", "num_prompts": 2, "max_new_tokens": 8, "sampling": {"temperature": 0.0}}
    >>> title_of({"arguments": arguments})
    'pocket, 2 prompts × 8 tokens, greedy'
    """
    arguments = result["arguments"]
    temperature = arguments["sampling"]["temperature"]
    title = f"{result['task']['name']}: " if "task" in result else ""
    title += f"{arguments['target']}, {arguments['num_prompts']} prompts × {arguments['max_new_tokens']} tokens, "
    title += f"temperature {temperature:g}" if temperature else "greedy"
    return marked(title, arguments)


def marked(title: str, arguments: dict[str, Any]) -> str:
    """A title that says before all else that verdicts were drawn, if they were.

    Args:
        title: of a result.
        arguments: the result's.
    """
    rates = arguments.get("synthetic_acceptance")
    return title if rates is None else f"SYNTHETIC ACCEPTANCE {', '.join(f'{rate:.3g}' for rate in rates)}: {title}"


def label(spec: str, figures: dict[str, Any]) -> str:
    """A method's name for readers: its kind, and the settings that its spec names."""
    name = LABELS.get(figures["method"], figures["method"])
    settings = settings_of(spec)[1:]
    for key in _EVIDENT:
        settings = [setting.removeprefix(key) for setting in settings]
    return ", ".join([name, *settings])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(figures: dict[str, Any], *keys: str) -> str:
    if figures[keys[0]] is None:
        return "-"
    return f"{sum(figures[key] for key in keys) / figures['total_s']:.0%}"


def findings(report: Report, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """An audit in words, a line each."""
    lines = [
        f"{report.verdict}: {report.reason}",
        f"  {report.answers} answers, {report.tokens} tokens, acceptance length {report.acceptance_length:.2f}",
    ]
    if (own := report.own_pass) is not None:
        sides = {"in plain decoding": own.plain, "with the drafter": own.drafted}
        differ = ", ".join(f"{side} by {apart}" for side, apart in sides.items() if apart is not None)
        lines.append(f"  from those of the model's own pass logits differ {differ}")
        lines.append(f"  up to {own.allowed} is allowed: {own.source}")
    if report.uniformity is not None and report.control is not None:
        caught = "was not caught" if report.control.is_uniform else "was caught"
        lines.append(f"  control, a rule that takes every drafted token: {caught}; {report.control.in_words}")
        return lines
    if not report.positions:
        return lines
    share = report.bitwise_equal / report.positions
    lines.append(
        f"  logits of {report.positions} places compared: {share:.0%} equal to the last bit, largest difference "
        f"{report.largest_difference:.2g}; passes of one and of several tokens differ by {report.rounding:.2g}"
    )
    for one in report.divergences:
        plain, drafted = (tokenizer.decode([token]) for token in (one.plain, one.drafted))
        lines.append(
            f"  prompt {one.prompt}, seed {one.seed}, new token {one.position}: {plain!r} without, {drafted!r} with "
            f"the drafter; margin {one.margin:.2g}, logits differ by {one.difference:.2g}: "
            + ("a near-tie" if one.is_tie else "NOT explained by rounding")
        )
    return lines


def write_json(file: Path, report: dict[str, Any]) -> None:
    """Writes the whole report, each list of numbers in one line."""
    plain = json.loads(json.dumps(report))  # JSON knows no tuples, and no keys but strings
    write_output(file, (_indented(plain, "\n") + "\n").encode())


def _indented(value: Any, margin: str) -> str:
    """As `json.dumps` with an indent of 1, which would give each number of a list a line of its own."""
    inside = margin + " "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key, ensure_ascii=False)}: {_indented(one, inside)}" for key, one in value.items()]
        return "{" + inside + f",{inside}".join(entries) + margin + "}"
    if isinstance(value, list) and not all(isinstance(one, int | float) for one in value):
        return "[" + inside + f",{inside}".join(_indented(one, inside) for one in value) + margin + "]"
    return json.dumps(value, ensure_ascii=False)

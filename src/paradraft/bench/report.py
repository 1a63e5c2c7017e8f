"""A benchmark's figures as a table, a plot and a JSON file."""

from __future__ import annotations

import io
import json
import textwrap
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from paradraft.bench.audit import Report
from paradraft.bench.methods import settings_of
from paradraft.output import write_output

Summary = dict[str, dict[str, Any]]

LABELS = {
    "hf": "AR", "ar": "AR+", "autoregressive": "VSD", "pard": "PARD", "ngram": "n-gram",
    "hf-assisted": "assisted", "hf-prompt-lookup": "lookup",
    "vllm": "vLLM", "vllm-draft": "vLLM VSD", "vllm-pard": "vLLM PARD", "vllm-ngram": "vLLM n-gram",
}  # fmt: skip
CAPTION = (
    "AR, assisted, lookup: generate of transformers · AR+: ours without a drafter · VSD: an ordinary draft model · "
    "length: tokens per target pass · draft, verify, rest: shares of the time · "
    "floor: least time that its passes can take here / time they took, both with prefill · same: the tokens of AR+"
)
DRAWN = "SYNTHETIC ACCEPTANCE: verdicts are drawn, texts are not the target's"
_EVIDENT = ("dtype=", "draft=", "verify=", "lengths=")
"""Settings whose value says what it is."""


def table(summary: Summary, title: str) -> Table:
    """One line per method: speed, acceptance length, and the shares of drafting, verifying and the rest of its time."""
    is_drawn = any(figures.get("synthetic_acceptance") for figures in summary.values())
    caption = f"{DRAWN} · {CAPTION}" if is_drawn else CAPTION
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("method", "tokens/s", "vs AR", "vs AR+", "length", "draft", "verify", "rest", "floor", "same"):
        result.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for spec, figures in summary.items():
        parts = [_share(figures, key) for key in ("draft_s", "verify_s")]
        parts.append(_share(figures, "prefill_s", "other_s"))
        result.add_row(
            label(spec, figures),
            f"{figures['tokens_per_s']['median']:.0f}",
            _times(figures["speedup_vs_hf"]),
            _times(figures["speedup_vs_ar"]),
            "-" if figures["acceptance_length"] is None else f"{figures['acceptance_length']:.2f}",
            *parts,
            "-" if figures.get("share_of_floor") is None else f"{figures['share_of_floor']:.0%}",
            {True: "yes", False: "no", None: "-"}[figures["identical_to_ar"]],
        )
    return result


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
    if report.uniformity is not None and report.control is not None:
        caught = "was not caught" if report.control.is_uniform else "was caught"
        lines.append(f"  control, a rule that takes every drafted token: {caught}; {report.control.in_words}")
        return lines
    share = report.bitwise_equal / max(report.positions, 1)
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


def plot(summary: Summary, title: str, file: Path) -> None:
    """Writes a PNG: tokens per second, and acceptance by position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, acceptance = figure.subplots(1, 2)
    figure.suptitle(textwrap.fill(title, 100))
    specs = list(summary)
    labels = [label(spec, summary[spec]) for spec in specs]
    values = [summary[spec]["tokens_per_s"]["median"] for spec in specs]
    bars = speed.barh(labels, values, color=[f"C{i}" for i in range(len(specs))])
    speed.bar_label(
        bars, [f"{value:.0f}  ({_times(summary[s]['speedup_vs_ar'])})" for value, s in zip(values, specs, strict=True)]
    )
    speed.invert_yaxis()
    speed.margins(x=0.25)
    speed.set_xlabel("tokens per second (against AR+)")
    for index, spec in enumerate(specs):
        rates = summary[spec]["acceptance_per_position"]
        if rates:
            acceptance.plot(range(1, len(rates) + 1), rates, marker="o", color=f"C{index}", label=labels[index])
    acceptance.set(xlabel="position in the draft", ylabel="share accepted", ylim=(0, 1))
    if acceptance.lines:
        acceptance.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_output(file, image.getvalue())

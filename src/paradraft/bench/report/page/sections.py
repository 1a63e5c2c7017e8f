"""Sections of a report, without the answers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from paradraft.bench.baselines import HF, PEERS
from paradraft.bench.labels import LABELS, full_paths, labels
from paradraft.bench.latency import LATENCIES, TERMS, have_latencies
from paradraft.bench.report.page.charts import Bar, bars, key, lanes, lines
from paradraft.bench.report.page.html import (
    FAMILIES,
    Element,
    Figures,
    family,
    joined,
    legend,
    marked_name,
    name_of,
    number,
    section,
    table,
    tile,
)
from paradraft.bench.result import FIRST
from paradraft.bench.result_file import has_faster_baselines, without_baseline
from paradraft.bench.spec import AR
from paradraft.bench.steadiness import unsteady_runs
from paradraft.data.prompt_source import DEFAULT

PARTS = {
    "draft": "drafting",
    "verify": "the target's pass and the verdict",
    "other": "the rest",
}


def heading(result: dict[str, Any], title: str) -> Element:
    """The title of the measurement, and the main numbers."""
    methods = result["methods"]
    best, figures = max(methods.items(), key=lambda item: item[1]["tokens_per_s"]["median"])
    speed = figures["tokens_per_s"]["median"]
    tiles = [tile(number(speed, ".0f"), f"tokens/s with {labels(methods)[best]}, the fastest of {len(methods)}")]
    for name, words in ((AR, "decoding without a drafter, in the same dtype"), (HF, "generate of transformers")):
        times = figures[f"speedup_vs_{name}"]
        if times is not None and figures["method"] != name:
            tiles.append(tile(number(times, ".2f", "×"), f"the speed of {LABELS[name]}, {words}"))
    compared = [entry["identical_to_ar"] for entry in methods.values() if entry["method"] not in (AR, *PEERS)]
    compared = [same for same in compared if same is not None]
    if compared:
        tiles.append(
            tile(f"{sum(compared)} of {len(compared)}", f"methods of ours give the very tokens of {LABELS[AR]}")
        )
    origin = f" The prompts are {DEFAULT}." if result["arguments"].get("prompts") == DEFAULT else ""
    return Element.of(
        "header",
        Element.of("p", "paradraft bench", class_="kicker"),
        Element.of("h1", title),
        Element.of(
            "p",
            "All methods answered the same prompts on one machine, taking turns. Times include reading the prompt and "
            f"the first draft; only tokens that were emitted count.{origin}",
            class_="lead",
        ),
        Element.of("ul", *tiles, class_="tiles"),
    )


def speeds(result: dict[str, Any]) -> Element:
    """Tokens per second, with their spread."""
    methods = result["methods"]
    most = max(max(entry["tokens_per_s"]["runs"]) for entry in methods.values())
    drawn = []
    for spec, entry in methods.items():
        median, runs = entry["tokens_per_s"]["median"], entry["tokens_per_s"]["runs"]
        value = [number(median, ".0f")]
        if entry["speedup_vs_ar"] is not None:
            value += [Element.of("small", " ", number(entry["speedup_vs_ar"], ".2f", "×"))]
        spread = (min(runs) / most, max(runs) / most) if len(runs) > 1 else None
        drawn.append(
            Bar(
                name=marked_name(spec, methods), value=joined(value), family=family(entry["method"]),
                parts={"": median / most}, spread=spread,
            )
        )  # fmt: skip
    runs = max(len(entry["tokens_per_s"]["runs"]) for entry in methods.values())
    words = "Median of the runs; the mark reaches from the slowest to the fastest. " if runs > 1 else "One run. "
    if any(entry["speedup_vs_ar"] is not None for entry in methods.values()):
        words += f"Behind it: times the speed of {LABELS[AR]} of the same dtype and batch size, marked as a baseline. "
    if has_faster_baselines(methods):
        words += f"Against the fastest {LABELS[AR]}: see all figures."
    families = [name for name in FAMILIES if any(family(entry["method"]) == name for entry in methods.values())]
    skipped = [
        Element.of("p", Element.of("strong", spec), f" was not run. {why}", class_="note warning")
        for spec, why in result.get("skipped", {}).items()
    ]
    lacking = [
        Element.of(
            "p", f"No {missing} in this run, so no speedup of: {'; '.join(labels(methods)[s] for s in specs)}.",
            class_="note warning",
        )
        for missing, specs in without_baseline(methods).items()
    ]  # fmt: skip
    skipped += [Element.of("p", path, class_="note") for path in full_paths(methods)]
    if (unsteady := unsteady_runs(methods)) is not None:
        skipped.append(Element.of("p", f"{unsteady[0].upper()}{unsteady[1:]}.", class_="note warning"))
    return section("Tokens per second", words, bars(drawn), legend(families, FAMILIES), *lacking, *skipped)


def acceptance(result: dict[str, Any]) -> Element | None:
    """Accepted drafted tokens per round, with all rounds in the denominator."""
    methods = result["methods"]
    drafting = [spec for spec, entry in methods.items() if entry["acceptance_per_position"]]
    shares = {spec: entry["accepted_share_of_rounds"] for spec, entry in methods.items()}
    known = {spec: values for spec, values in shares.items() if values}
    if not known:
        return None
    names = {spec: name for spec, name in labels(methods).items() if spec in known}
    chart = lines(
        {names[spec]: values for spec, values in known.items()},
        title="Accepted tokens of a round",
        description="The table below has all values.",
        across="i, drafted tokens accepted",
        up="share of all rounds that accepted at least i",
    )
    deepest = max(map(len, known.values()))
    head = ["", "tokens per pass", f"first {FIRST} tokens", *(f"≥ {i}" for i in range(1, deepest + 1))]
    rows = [
        [
            joined([key(index), Element.of("span", names[spec])]),
            number(methods[spec]["acceptance_length"], ".2f"),
            number(methods[spec]["acceptance_length_first_32"], ".2f"),
            *(number(value, ".0%") for value in values),
            *[Element("")] * (deepest - len(values)),
        ]
        for index, (spec, values) in enumerate(known.items())
    ]
    words = (
        "The share of all rounds (passes of the target) in which at least 1, 2, … drafted tokens became text. Rounds "
        "with a shorter draft, or none, count in full, so the shares of a method add up to the tokens that it gains: "
        "tokens per pass less one. Tokens per pass: emitted tokens for each pass of the target, its own token "
        f"included; beside it the same over the first {FIRST} tokens of each answer, because later on greedy "
        "answers of small models repeat themselves."
    )
    if unknown := [labels(methods)[spec] for spec in drafting if spec not in known]:
        words += f" The file does not tell of: {'; '.join(unknown)}."
    return section("Accepted tokens of a round", words, chart, table("Accepted tokens of a round", head, rows))


def rounds(result: dict[str, Any]) -> Element | None:
    """The shares of the time of a round."""
    split: dict[str, dict[str, float]] = {}
    for spec, entry in result["methods"].items():
        if entry["draft_s"] is not None and entry["tokens"]:
            per_round_ms = 1000 * entry["acceptance_length"] / entry["tokens"]
            split[spec] = {part: entry[f"{part}_s"] * per_round_ms for part in PARTS}
    if not split:
        return None
    most = max(sum(times.values()) for times in split.values())
    drawn = []
    for spec, times in split.items():
        entry = result["methods"][spec]
        value = joined(
            [
                number(sum(times.values()), ".1f", " ms "),
                Element.of("small", "for ", number(entry["acceptance_length"], ".2f")),
            ]
        )
        shares = {part: time_ms / most for part, time_ms in times.items()}
        drawn.append(Bar(name=name_of(spec, result["methods"]), value=value, family="", parts=shares))
    return section(
        "Time of a round",
        "Milliseconds of one round, of a batch per row, and how many tokens it yields on average. Reading the prompt "
        "is not part of it. Peers do not tell.",
        bars(drawn),
        legend(list(PARTS), PARTS),
    )


def latency(result: dict[str, Any]) -> Element | None:
    """Latencies as servers report them: TTFT, TPOT and ITL."""
    methods = result["methods"]
    if not have_latencies(methods):
        return None
    head = ["", *(f"{name} {share}" for name in LATENCIES.values() for share in ("p50", "p99"))]
    rows = [
        [
            name_of(spec, methods),
            *(number((entry.get(key) or {}).get(share), ".2f", " ms") for key in LATENCIES for share in ("p50", "p99")),
        ]
        for spec, entry in methods.items()
    ]
    words = "In milliseconds, from the request; all prompts of a batch are asked at the same time. "
    return section("Latency", f"{words}{TERMS}.", table("Latency", head, rows))


def timeline(result: dict[str, Any]) -> Element | None:
    """A timeline of both sides of drafting ahead, as in the PEARL paper's Figure 1: gaps are waits."""
    drawn: list[Element] = []
    for spec, pieces in (result.get("timeline") or {}).items():
        if not pieces or spec not in result["methods"]:
            continue
        entry = result["methods"][spec]
        busy = "".join(f", {side} {share:.0%}" for side, share in (entry["sides"] or {"busy": {}})["busy"].items())
        name = labels(result["methods"])[spec]
        drawn.append(Element.of("p", Element.of("strong", name), Element.of("small", f" at work{busy} of the time")))
        drawn.append(lanes(pieces, title=f"When both sides of {name} were at work", unit="ms"))
    if not drawn:
        return None
    return section(
        "Who waits",
        "The first rounds of the first answer, where the drafter works while the target verifies: gaps are waits, for "
        "the other side or for what both need between rounds.",
        *drawn,
    )


def roofline(result: dict[str, Any]) -> Element | None:
    """The share of the floor of each method: the least time that this machine can take."""
    floored = {spec: entry for spec, entry in result["methods"].items() if entry.get("share_of_floor") is not None}
    if not floored:
        return None
    drawn = [
        Bar(
            name=name_of(spec, result["methods"]),
            value=joined([number(entry["share_of_floor"], ".0%"), _seconds(entry)]),
            family=family(entry["method"]), parts={"": entry["share_of_floor"]},
        )
        for spec, entry in floored.items()
    ]  # fmt: skip
    return section(
        "Share of the floor",
        "The floor is the least time in which this machine can read the weights, keys and values of all passes of a "
        "method, and multiply: at 100 % no program could be faster with the same passes.",
        bars(drawn),
    )


def _seconds(entry: Figures) -> Element:
    if entry.get("floor_s") is None:
        return Element("")
    return Element.of("small", " ", number(entry["floor_s"], ".2f"), " of ", number(entry["total_s"], ".2f", " s"))


def figures(result: dict[str, Any]) -> Element:
    """All numbers in a table."""
    columns: dict[str, Callable[[Figures], Element]] = {
        "tokens/s": lambda entry: number(entry["tokens_per_s"]["median"], ".1f"),
        "slowest run": lambda entry: number(min(entry["tokens_per_s"]["runs"]), ".1f"),
        "fastest run": lambda entry: number(max(entry["tokens_per_s"]["runs"]), ".1f"),
        f"× {LABELS[HF]}": lambda entry: number(entry["speedup_vs_hf"], ".2f"),
        f"× {LABELS[AR]}": lambda entry: number(entry["speedup_vs_ar"], ".2f"),
        f"× fastest {LABELS[AR]}": lambda entry: number(entry["speedup_vs_fastest_ar"], ".2f"),
        "tokens per pass": lambda entry: number(entry["acceptance_length"], ".2f"),
        f"first {FIRST} tokens": lambda entry: number(entry["acceptance_length_first_32"], ".2f"),
        "same tokens": lambda entry: Element({True: "yes", False: "no", None: "–"}[entry["identical_to_ar"]]),
        "distinct 4-grams": lambda entry: number(entry.get("distinct_4grams"), ".0%"),
        "tokens": lambda entry: number(entry["tokens"], "d"),
        "memory, MiB": lambda entry: number(entry["peak_rss_bytes"] / 2**20, ".0f"),
    }
    methods = result["methods"]
    rows = [
        [marked_name(spec, methods), *(show(entry) for show in columns.values())] for spec, entry in methods.items()
    ]
    differing = [
        f"{labels(methods)[spec]} in {len(entry['differing_prompts'])}"
        for spec, entry in methods.items()
        if entry["differing_prompts"]
    ]
    warning = [
        Element.of("p", f"Answers that differ from {LABELS[AR]}: {', '.join(differing)}.", class_="note warning")
    ]
    return section(
        "All figures",
        "× AR: against the fastest one. × AR+: against the one of the same dtype and batch size; × fastest AR+: "
        "against the fastest of that batch size with whole weights (int8 and int4 are another target). "
        f"First {FIRST} tokens: tokens per pass over the first {FIRST} tokens of each answer. Distinct 4-grams: the "
        "share of the runs of four tokens in an answer that stand in it for the first time; where it is low, answers "
        "repeat themselves, and drafts are accepted more. "
        "Same tokens: as AR+, compared where both must be equal. Memory: the most of the process while the method "
        "answered, with the models of all methods; vLLM and llama.cpp have processes of their own.",
        table("All figures", ["", *columns], rows),
        *(warning if differing else ()),
    )


def machine(result: dict[str, Any]) -> Element:
    """Hardware, versions, and the command."""
    environment = result["machine"]
    memory = environment.get("memory_bytes")
    facts = {
        "processor": f"{environment.get('cpu', '')} ({environment.get('cpu_capability', '')})",
        "cores, threads": f"{environment.get('cores')}, {environment.get('threads')}",
        "memory": None if memory is None else f"{memory / 2**30:.1f} GiB",
        "GPU": environment.get("gpu"),
        "system": environment.get("system"),
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {"Python": environment.get("python"), **environment.get("versions", {})}.items()
        ),
        "load at the end": None if environment.get("load_average") is None else f"{environment['load_average']:.2f}",
        "date": environment.get("date"),
    }
    described = [
        element
        for name, value in facts.items()
        if value
        for element in (Element.of("dt", name), Element.of("dd", str(value)))
    ]
    return section(
        "Machine and command",
        None,
        Element.of("dl", *described),
        Element.of("pre", Element.of("code", shlex.join(map(str, environment.get("command", ()))))),
    )

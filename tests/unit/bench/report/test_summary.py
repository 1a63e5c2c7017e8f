"""What the table shows of a benchmark's figures, and how they stand in a file."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from paradraft.bench.report.plot import plot
from paradraft.bench.report.summary import notes, table, write_json
from tests.support.bench_result import result


def figures(method: str, **given: Any) -> dict[str, Any]:
    shown = {
        "method": method, "dtype": "float32", "batch": 1, "tokens_per_s": {"median": 123.4}, "speedup_vs_hf": 2.0,
        "speedup_vs_ar": None, "speedup_vs_fastest_ar": None, "baseline": None, "fastest_baseline": None,
        "acceptance_length": 2.345, "acceptance_length_first_32": 1.875, "distinct_4grams": 0.25, "draft_s": 1.0,
        "verify_s": 2.0, "prefill_s": 0.5, "other_s": 0.5, "total_s": 4.0, "share_of_floor": 0.625,
        "identical_to_ar": True,
    }  # fmt: skip
    return {**shown, **given}


def lines(summary: dict[str, dict[str, Any]], width: int = 80) -> list[list[str]]:
    out = StringIO()
    Console(file=out, width=width).print(table(summary, "title"))
    rows = [line.strip() for line in out.getvalue().splitlines()]
    return [re.split(r"\s{2,}", row) for row in rows if re.search(r"\s{2,}(yes|no|-)$", row)]


def test_every_figure_stands_in_its_column() -> None:
    """Guards against a column that shows another's figure, and shares that leave a part of the time out."""
    (row,) = lines({"pard:k=4": figures("pard")})
    assert row == ["PARD, k=4", "123", "2.00x", "-", "2.35", "1.88", "25%", "50%", "25%", "62%", "yes"]


def test_refused_passes_are_in_the_legend() -> None:
    """Guards a benchmark of PyTorch that says it is one of the passes in C++."""
    reason = "the C++ pass failed its self-check on this model (formula 9 of at most 5)"
    summary = {spec: figures("pard", refusals={"draft": [reason]}) for spec in ("pard:k=4", "pard:k=8")}
    out = StringIO()
    Console(file=out, width=200).print(table(summary, "title"))
    assert out.getvalue().count(f"SLOW: draft: {reason}") == 1
    assert "SLOW" not in str(lines({"pard:k=4": figures("pard", refusals={})}))


def test_what_was_not_measured_is_a_dash() -> None:
    """Guards against figures of our loop for `generate`, which has none, and "no" where nothing was compared."""
    nothing = dict.fromkeys(
        (
            "acceptance_length",
            "acceptance_length_first_32",
            "draft_s",
            "verify_s",
            "prefill_s",
            "other_s",
            "identical_to_ar",
            "share_of_floor",
        )
    )
    (row,) = lines({"hf": figures("hf", **nothing)})
    assert row == ["AR", "123", "2.00x", "-", "-", "-", "-", "-", "-", "-", "-"]


def test_baselines_are_marked_and_both_ratios_stand_side_by_side() -> None:
    """Guards the two truths of one name: the README divided by the row's own dtype, the table by the fastest of any."""
    ours = {
        "speedup_vs_ar": 1.0,
        "baseline": "ar",
        "speedup_vs_fastest_ar": 0.5,
        "fastest_baseline": "ar:dtype=bfloat16",
    }
    fast = {"dtype": "bfloat16", "baseline": "ar:dtype=bfloat16", "fastest_baseline": "ar:dtype=bfloat16"}
    summary = {
        "ar": figures("ar", **ours),
        "ar:dtype=bfloat16": figures("ar", **fast, speedup_vs_ar=1.0, speedup_vs_fastest_ar=1.0),
        "pard:k=6": figures("pard", **{**ours, "speedup_vs_ar": 1.44, "speedup_vs_fastest_ar": 0.72}),
    }
    shown = lines(summary, width=120)
    assert [row[0] for row in shown] == ["AR+ *", "AR+, bfloat16 **", "PARD, k=6"]
    assert [row[3:5] for row in shown] == [["1.00x", "0.50x"], ["1.00x", "1.00x"], ["1.44x", "0.72x"]]
    alone = lines({"ar": figures("ar", speedup_vs_ar=1.0, baseline="ar", fastest_baseline="ar")}, width=120)
    assert alone[0][:4] == ["AR+ *", "123", "2.00x", "1.00x"] and len(alone[0]) == 11


def test_a_table_says_what_it_lacks_and_how_far_answers_repeat_themselves() -> None:
    """Guards against an empty column without a reason, and lengths that nobody can judge."""
    summary = {
        "ar": figures("ar", baseline="ar", fastest_baseline="ar"),
        "pard:k=4": figures("pard", baseline="ar", fastest_baseline="ar"),
        "pard:k=4:dtype=bfloat16": figures("pard", dtype="bfloat16", fastest_baseline="ar", distinct_4grams=0.81),
    }
    summary["pard:k=4"]["advice"] = "drafting made this 1.2 x slower here: try --drafter none"
    assert notes(summary) == [
        "distinct 4-grams of the answers: 25% (but 81% of PARD, k=4, bfloat16)",
        "PARD, k=4: drafting made this 1.2 x slower here: try --drafter none",
        "no AR+ in bfloat16 in this run, so nothing stands under vs AR+ for: PARD, k=4, bfloat16",
    ]


def test_settings_are_named_where_the_value_does_not_say_what_it_is() -> None:
    """Guards against lines that look alike, and a table too wide for a terminal of 80 columns."""
    specs = ["pard:k=8:dtype=bfloat16", "autoregressive:k=3", "pard:draft=build/demo/pard", "ar", "ngram"]
    specs += ["pard:tree=8:verify=rejection", "pard:lengths=expected:batch=4"]
    names = [row[0] for row in lines({spec: figures(spec.partition(":")[0]) for spec in specs}, width=96)]
    assert names == [
        "PARD, k=8, bfloat16", "VSD, k=3", "PARD, build/demo/pard", "AR+", "n-gram", "PARD, tree=8, rejection",
        "PARD, expected, batch=4",
    ]  # fmt: skip


def test_a_list_of_numbers_takes_one_line(tmp_path: Path) -> None:
    """Guards files that people read: a line for each token made 40 thousand of them."""
    file = tmp_path / "report.json"
    report = {"tokens": [[5, 6, 7], []], "times": (0.5, 1e-9), 8: "Grüße, [1]\n", "none": None, "runs": [{"a": 1}, {}]}
    write_json(file, report)
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(report))
    assert file.read_text(encoding="utf-8").splitlines() == [
        "{", ' "tokens": [', "  [5, 6, 7],", "  []", " ],", ' "times": [0.5, 1e-09],', r' "8": "Grüße, [1]\n",',
        ' "none": null,', ' "runs": [', "  {", '   "a": 1', "  },", "  {}", " ]", "}",
    ]  # fmt: skip


def test_what_holds_no_numbers_is_written_as_ever(tmp_path: Path) -> None:
    """Guards against a format of our own where none is needed."""
    file = tmp_path / "report.json"
    report = {"a": {"b": ["x", {"c": None}], "d": []}, "e": 1.5, "f": [["y"], True]}
    write_json(file, report)
    assert file.read_text(encoding="utf-8") == json.dumps(report, indent=1) + "\n"


def test_links_stay_where_results_are_written(tmp_path: Path) -> None:
    """Guards against a result that replaces the link to its place."""
    summary = {"pard": figures("pard")}
    for name in ("report.json", "report.png"):
        (tmp_path / name).symlink_to(tmp_path / f"real-{name}")
    write_json(tmp_path / "report.json", summary)
    plot(result(), tmp_path / "report.png")
    assert all((tmp_path / name).is_symlink() for name in ("report.json", "report.png"))
    assert json.loads((tmp_path / "real-report.json").read_text())
    assert (tmp_path / "real-report.png").read_bytes().startswith(b"\x89PNG")

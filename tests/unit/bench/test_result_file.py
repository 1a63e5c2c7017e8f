"""Which AR+ a method is compared with, in a fresh run and in files of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paradraft.bench.report.page import read_result
from paradraft.bench.result_file import completed, mark, selected, speedups, without_baseline
from tests.support.bench_result import result

ROOT = Path(__file__).parents[3]
GREEDY = ROOT / "benchmarks" / "cpp-greedy_epyc-avx512-2cores_2026-11-22.json"


def run(**speeds: float) -> dict[str, dict[str, Any]]:
    """Methods by spec, as `ar_bfloat16_4=100.0`: name, dtype and batch size."""
    found = {}
    for name, speed in speeds.items():
        method, dtype, batch = name.split("_")
        figures = {"method": method, "dtype": dtype, "batch": int(batch), "tokens_per_s": {"median": speed}}
        found[name] = figures
    return found


def test_the_main_figure_is_against_ar_plus_of_the_same_dtype() -> None:
    """Guards against a float32 row that is divided by AR+ in bfloat16, which says nothing of its drafter."""
    found = speedups(run(ar_float32_1=100, ar_bfloat16_1=200, pard_float32_1=150, pard_bfloat16_1=500))
    assert [one["speedup_vs_ar"] for one in found.values()] == [1.0, 1.0, 1.5, 2.5]
    assert [one["speedup_vs_fastest_ar"] for one in found.values()] == [0.5, 1.0, 0.75, 2.5]
    assert [one["baseline"] for one in found.values()] == ["ar_float32_1", "ar_bfloat16_1"] * 2
    assert {one["fastest_baseline"] for one in found.values()} == {"ar_bfloat16_1"}
    assert [mark(spec, found) for spec in found] == ["*", "**", "", ""]


def test_rounded_weights_are_the_baseline_of_their_own_rows_alone() -> None:
    """Guards against AR+ in int8, which is another target, as the yardstick of whole weights or of int4."""
    found = speedups(run(ar_int8_1=400, ar_bfloat16_1=200, pard_int8_1=600, pard_bfloat16_1=300, pard_int4_1=900))
    assert [one["speedup_vs_ar"] for one in found.values()] == [1.0, 1.0, 1.5, 1.5, None]
    assert [one["speedup_vs_fastest_ar"] for one in found.values()] == [2.0, 1.0, 3.0, 1.5, 4.5]
    alone = speedups(run(ar_int8_1=400, pard_int8_1=600, pard_int4_1=900))
    assert [one["speedup_vs_fastest_ar"] for one in alone.values()] == [1.0, 1.5, None]


def test_without_ar_plus_of_its_dtype_and_batch_size_a_method_has_no_speedup() -> None:
    """Guards against a batch of four that is called four times as fast, and a ratio whose denominator did not run."""
    methods = run(ar_float32_1=100, pard_float32_4=400, pard_bfloat16_1=150, hf_float32_1=50)
    found = speedups(methods)
    assert [one["speedup_vs_ar"] for one in found.values()] == [1.0, None, None, 0.5]
    assert [one["speedup_vs_fastest_ar"] for one in found.values()] == [1.0, None, 1.5, 0.5]
    assert [one["speedup_vs_hf"] for one in found.values()] == [2.0, 8.0, 3.0, 1.0]
    assert without_baseline({spec: methods[spec] | found[spec] for spec in methods}) == {
        "AR+ in float32 and batches of 4": ["pard_float32_4"],
        "AR+ in bfloat16": ["pard_bfloat16_1"],
    }


def test_earlier_files_are_read_with_the_speedups_of_today() -> None:
    """Guards files in which `speedup_vs_ar` is against the fastest AR+ of any dtype: 1.32 where 1.44 is meant."""
    written = json.loads(GREEDY.read_text(encoding="utf-8"))["methods"]
    methods = read_result(GREEDY)["methods"]
    speed = {spec: one["tokens_per_s"]["median"] for spec, one in written.items()}
    assert methods["pard:k=6"]["speedup_vs_ar"] == speed["pard:k=6"] / speed["ar"]
    assert methods["pard:k=6"]["speedup_vs_fastest_ar"] == speed["pard:k=6"] / speed["ar:dtype=bfloat16"]
    for spec, one in methods.items():
        assert one["speedup_vs_hf"] == pytest.approx(written[spec]["speedup_vs_hf"])


def test_earlier_files_get_what_their_rounds_tell() -> None:
    """Guards older results against empty columns where the raw numbers are in the file, and against made-up ones."""
    older = result()
    for one in older["methods"].values():
        for key in ("acceptance_length_first_32", "accepted_share_of_rounds", "speedup_vs_fastest_ar", "baseline"):
            del one[key]
    older["answers"] = {"pard:k=4": {"tokens": [[1] * 40, [2] * 4], "by_round": [[5] * 4 + [1] * 20, [3, 1]]}}
    methods = completed(older)["methods"]
    # 32 of 40 tokens in 4 + 12 passes, and 4 in 2.
    assert methods["pard:k=4"]["acceptance_length_first_32"] == pytest.approx(36 / 18)
    shares = [5 / 26, 5 / 26, 4 / 26, 4 / 26]
    assert methods["pard:k=4"]["accepted_share_of_rounds"] == pytest.approx(shares)
    assert methods["vllm-pard:k=4"]["accepted_share_of_rounds"] is None
    assert methods["vllm-pard:k=4"]["speedup_vs_fastest_ar"] == methods["vllm-pard:k=4"]["speedup_vs_ar"] == 1.0
    new = result()
    assert completed(new)["methods"]["pard:k=4"]["accepted_share_of_rounds"] == [0.75, 0.512345]


def test_a_selection_keeps_the_figures_of_the_whole_run() -> None:
    """Guards a picture of a few rows: their baselines may be among those left out."""
    whole = read_result(GREEDY)
    few = selected(whole, ["pard:k=8:dtype=bfloat16", "pard:k=6"])
    assert list(few["methods"]) == ["pard:k=8:dtype=bfloat16", "pard:k=6"]
    assert few["methods"]["pard:k=6"] == whole["methods"]["pard:k=6"]
    assert set(few["example"]["answers"]) == set(few["methods"])
    assert list(selected(whole, ["AR+", "PARD, k=6"])["methods"]) == ["ar", "pard:k=6"], "as tables call them"
    with pytest.raises(ValueError, match=r"no method 'pard:k=5'; use some of hf, "):
        selected(whole, ["pard:k=5"])

"""TTFT, TPOT and ITL: as `vllm bench serve` defines them, by hand."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from paradraft.bench.latency import latencies
from paradraft.bench.report.page import page
from paradraft.bench.report.summary import latency_table
from paradraft.bench.result import BatchResult
from paradraft.bench.result_file import completed
from tests.support.bench_result import figures, result

SPREAD = {
    "ttft_ms": {"p50": 12.25, "p99": 19.5, "count": 4}, "tpot_ms": {"p50": 1.125, "p99": 1.5, "count": 3},
    "itl_ms": {"p50": 3.375, "p99": 123.75, "count": 90},
}  # fmt: skip


def answered(tokens: list[int], delivered_s: list[list[float]] | None) -> BatchResult:
    return BatchResult(
        tokens=[[1] * number for number in tokens], total_s=1.0, stats=None, delivered_s=delivered_s
    )  # fmt: skip


def test_latencies_are_those_of_vllm_bench_serve() -> None:
    """Guards the definitions: TPOT is by tokens, without the first, and ITL is by rounds."""
    # Five tokens in three rounds, one token in one, and none at all.
    found = latencies([answered([5, 1], [[0.1, 0.2, 0.5], [0.3]]), answered([0], [[]])])
    assert found["ttft_ms"] == pytest.approx({"p50": 200.0, "p99": 298.0, "count": 2})
    assert found["tpot_ms"] == pytest.approx({"p50": 1e3 * (0.5 - 0.1) / 4, "p99": 100.0, "count": 1})
    assert found["itl_ms"] == pytest.approx({"p50": 200.0, "p99": 299.0 - 1.0, "count": 2})


def test_who_does_not_tell_has_no_latencies() -> None:
    """Guards against a peer's zeros: vLLM does not say when tokens came."""
    assert latencies([answered([5], None)]) == {"ttft_ms": None, "tpot_ms": None, "itl_ms": None}


def test_every_latency_stands_in_its_column() -> None:
    """Guards against percentiles that change places, in 80 columns, and against terms that nobody explains."""
    summary = {"hf": figures("hf"), "pard:k=4": figures("pard", **SPREAD)}
    out = StringIO()
    table = latency_table(summary)
    assert table is not None
    Console(file=out, width=80).print(table)
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["AR", *["-"] * 6] in rows
    assert ["PARD,", "k=4", "12.2", "19.5", "1.12", "1.50", "3.38", "124"] in rows
    text = " ".join(out.getvalue().split())
    assert "TTFT: time to first token" in text and "(latency - TTFT) / (tokens - 1)" in text
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_files_of_before_have_no_latencies_and_are_shown_all_the_same() -> None:
    """Guards `paradraft report` of an old file: no key, no table, no error."""
    old = completed(result())
    assert {figures["itl_ms"] for figures in old["methods"].values()} == {None}
    assert latency_table(old["methods"]) is None and "TTFT" not in page(old)
    new = result()
    new["methods"]["pard:k=4"] |= SPREAD
    assert "TTFT p50" in page(completed(new)) and "123.75 ms" in page(completed(new))

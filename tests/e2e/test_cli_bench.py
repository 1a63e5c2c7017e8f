"""Mistakes that `paradraft bench` finds before it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import EXACT, Paradraft, assert_mistake


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--methods", "hf,oracle"], "oracle"),
        (["--methods", "ngram:k=0"], "k=0"),
        (["--methods", "ngram:k=1000000000"], "k=1000000000"),
        (["--methods", "ngram:k=3:k=4"], "each at most once"),
        (["--methods", "ngram:tree=3"], "ngram:tree=3"),
        (["--verify", "magic"], "verify='magic'"),
        (["--lengths", "long"], "lengths='long'"),
        (["--batch-size", "2,none"], "2,none"),
        (["--batch-size", 2], "batches of 2"),
        (["--methods", "ar:batch=2", "--batch-size", "1,2"], "one or the other"),
        (["--json", "no-such-folder/out.json"], "no-such-folder"),
        (["--plot", "no-such-folder/out.png"], "no-such-folder"),
        (["--json", "out.png", "--plot", "out.png"], "one file"),
        (["--runs", 0], "--runs"),
        (["--threads", 0], "--threads"),
        (["--num-prompts", 2], "num_prompts=2: use 1 to 1, "),
        (["--num-prompts", 0], "num_prompts=0: use 1 to 1, "),
        (["--max-new-tokens", 0], "--max-new-tokens"),
        (["--tree-budget", 0], "--tree-budget"),
        (["--methods", "ar,ngram:dtype=int3"], "'ngram:dtype=int3': dtype='int3'"),
    ],
)
def test_bad_bench_option(
    family: Path, paradraft: Paradraft, tmp_path: Path, arguments: list[object], named: str
) -> None:
    """Guards against measuring for an hour and failing when the result is written."""
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text('{"prompt": "x"}\n', encoding="utf-8")
    asked = ["--methods", "ar", "--num-prompts", 1, "--prompts", prompts, "--json", result, *EXACT]
    assert_mistake(paradraft("bench", "--target", family / "target", *asked, *arguments), named)
    assert not result.exists()

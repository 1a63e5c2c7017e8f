"""Mistakes that `paradraft bench` finds before it measures, and what it says of models that nobody has trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import shapes_on_gpu

from paradraft.digests import model_digest
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
        (
            ["--methods", "hf,ar", "--temperature", 1, "--min-p", 0.1],
            "min_p is for our own methods: leave it",
        ),
        (["--chat"], "no chat template"),
        (["--target", "shape:tiny-target", "--prompts", "-", "--chat"], "reads no texts"),
        (["--num-prompts", 2], "num_prompts=2: use 1 to 1, "),
        (["--num-prompts", 0], "num_prompts=0: use 1 to 1, "),
        (["--max-new-tokens", 0], "--max-new-tokens"),
        (["--tree-budget", 0], "--tree-budget"),
        (["--methods", "ar,ngram:dtype=int3"], "'ngram:dtype=int3': dtype='int3'"),
        (["--methods", "ngram", "--synthetic-acceptance", "0.5,0.9"], "rate 2 is larger"),
        (["--methods", "ngram", "--synthetic-acceptance", "0.9,0.5"], "'ngram' drafts 8 tokens, but there are 2 rates"),
        (["--methods", "ar,pard:draft=shape:tiny-draft:k=2"], "'shape:tiny-draft' has random weights"),
        (["--methods", "ar,hf-assisted:draft=shape:tiny-draft"], "leave this peer out"),
        (["--methods", "pard:draft=shape:tiny-draft", "--tree-budget", 9, "--synthetic-acceptance", "1"], "trees"),
        (["--methods", "ngram", "--target", "shape:tiny-target", "--prompt-tokens", 9], "--prompts"),
        (["--methods", "pard:k=2:draft_cpus=0"], "set gamma too"),
        (["--methods", "pard:gamma=2:draft_cpus=4000"], "there is no CPU 4000"),
        (["--methods", "pard:gamma=2:overlap=all"], "overlap='all'"),
        (["--methods", "hf:target_cpus=0"], "settings of hf are"),
        (["--target", "shape:gpt-9"], "unknown shape 'shape:gpt-9'"),
        (["--methods", "ar,pard", "--draft", "shape:tiny-drft"], "unknown shape 'shape:tiny-drft'"),
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


def shape_bench(paradraft: Paradraft, file: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """The report of a run on tiny shapes, and what was printed."""
    shapes = ["--target", "shape:tiny-target", "--draft", "shape:tiny-draft", "--no-compile", "--runs", 1]
    sizes = ["--num-prompts", 2, "--prompt-tokens", 7, "--max-new-tokens", 30]
    found = paradraft("bench", *shapes, *sizes, "--json", file, *arguments)
    assert found.code == 0, found.err
    assert "warning" not in found.err
    return json.loads(file.read_text(encoding="utf-8")), found.out


def test_drafting_ahead_is_measured(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards what a file says of both sides: passes, shares of the time, and a picture of who waits; and the texts."""
    prompts, result, page = tmp_path / "prompts.jsonl", tmp_path / "result.json", tmp_path / "page"
    prompts.write_text('{"prompt": "abcabc"}\n{"prompt": "xyzzy"}\n', encoding="utf-8")
    cpu = min(os.sched_getaffinity(0))
    methods = [f"ar:target_cpus={cpu}", "pard:gamma=3", f"pard:gamma=4:overlap=post:target_cpus={cpu}", "pard:k=3"]
    asked = ["--target", family / "target", "--draft", family / "pard", "--methods", ",".join(methods), "--runs", 1]
    asked += ["--num-prompts", 2, "--prompts", prompts, "--max-new-tokens", 24, "--no-compile", *EXACT]
    outcome = paradraft("bench", *asked, "--json", result, "--report", page)
    assert outcome.code == 0, outcome.err
    found = json.loads(result.read_text(encoding="utf-8"))
    ahead, post = found["methods"][methods[1]], found["methods"][methods[2]]
    assert found["methods"]["pard:k=3"]["sides"] is None and found["methods"][methods[0]]["target_cpus"] == [cpu]
    assert (ahead["gamma"], ahead["overlap"], post["overlap"], ahead["target_cpus"]) == (3, "both", "post", None)
    for one in (ahead, post):
        assert one["identical_to_ar"] is True
        assert one["sides"]["forwards"]["target"] == round(one["tokens"] / one["acceptance_length"])
        assert all(0 < share <= 1 for share in one["sides"]["busy"].values())
        assert one["sides"]["median_ms"]["round"] >= one["sides"]["median_ms"]["target"] > 0
    assert {side for side, _, _ in found["timeline"][methods[1]]} == {"target", "draft"}
    assert "Who waits" in (page / "index.html").read_text(encoding="utf-8")


def test_synthetic_acceptance_says_so_everywhere(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against a figure that is taken for a measurement of real texts: table, file and last line, and against
    answers that end early, methods without a floor, and rates that are not those asked for."""
    asked = ["--methods", "hf,ar,autoregressive:k=2,pard,ngram", "-k", 3, "--synthetic-acceptance", "1,1,0"]
    report, out = shape_bench(paradraft, tmp_path / "out.json", *asked)
    assert report["title"].startswith("SYNTHETIC ACCEPTANCE 1, 1, 0")
    assert "SYNTHETIC ACCEPTANCE" in out.splitlines()[0] and "verdicts are drawn" in out
    assert report["arguments"]["synthetic_acceptance"] == [1.0, 1.0, 0.0]
    methods = report["methods"]
    assert json.loads(out.splitlines()[-1]) == methods
    assert {figures["identical_to_ar"] for figures in methods.values()} == {None}
    assert [figures["synthetic_acceptance"] for figures in methods.values()] == [None, None] + 3 * [[1.0, 1.0, 0.0]]
    assert all(0 < figures["share_of_floor"] for figures in methods.values())
    assert {len(tokens) for answers in report["answers"].values() for tokens in answers["tokens"]} == {30}
    assert methods["pard"]["acceptance_per_position"] == [1.0, 1.0, 0.0]
    assert methods["pard"]["acceptance_length"] == methods["autoregressive:k=2"]["acceptance_length"] == 3.0


def test_the_time_of_a_round_is_told_by_what_runs_in_it(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against shares of something else than the whole, and a profile of methods that have no rounds of ours."""
    asked = ["--methods", "hf,pard", "-k", 2, "--synthetic-acceptance", "1,0"]
    report, out = shape_bench(paradraft, tmp_path / "out.json", *asked, "--profile")
    (profiled,) = report["profile"].values()
    assert profiled["rounds"] == 12
    assert sum(profiled["shares"].values()) == pytest.approx(1.0)
    assert all(0 < profiled["shares"][kind] < 1 for kind in ("products", "attention", "other ops", "Python, launch"))
    assert profiled["shares"]["compiled"] == profiled["shares"]["sync"] == 0
    assert "where a round's time goes" in out and "sync" in out


def test_shapes_need_no_rates_without_a_drafter(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the plainest question: which share of the floor do AR and AR+ reach on a model of that size?"""
    shapes = ["--target", "shape:tiny-target", "--methods", "hf,ar", "--no-compile", "--runs", 1, "--num-prompts", 1]
    found = paradraft("bench", *shapes, "--max-new-tokens", 9, "--json", tmp_path / "out.json")
    assert found.code == 0, found.err
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert "SYNTHETIC" not in report["title"] + found.out
    assert "1 random prompt × 9 tokens" in report["title"]
    assert report["methods"]["ar"]["synthetic_acceptance"] is None
    assert {report["methods"]["ar"][setting] for setting in ("k", "tree", "verify", "lengths")} == {None}
    assert report["methods"]["hf"]["decode_share_of_floor"] is None
    assert report["methods"]["ar"]["decode_share_of_floor"] > 0


def test_the_recipe_for_a_gpu_runs_on_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the one command of a rented GPU, whose hour is too dear to find its mistakes in."""
    sizes = ["--batch-sizes", "1", "2", "--prompts", "2", "--prompt-tokens", "5", "--tokens", "20", "--runs", "1"]
    shapes = ["--target", "shape:tiny-target", "--draft", "shape:tiny-draft", "--device", "cpu", "--dtype", "float32"]
    shapes_on_gpu.main(
        ["--json", str(tmp_path / "out.json"), *shapes, "--no-compile", *sizes, "--rates", "speed", "--no-profile"]
    )
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rates"]["speed"]
    assert list(report["methods"]) == ["ar:batch=1", "pard:k=12:batch=1", "ar:batch=2", "pard:k=12:batch=2"]
    assert "PARD is" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="multiple"):
        shapes_on_gpu.main(["--json", str(tmp_path / "out.json"), *shapes, "--batch-sizes", "3", "--prompts", "2"])


def test_the_recipe_derives_the_rates_that_it_documents() -> None:
    """Guards the goal of a GPU run against rates that are easier than the paper's: 5.07 and 6.7 tokens per pass."""
    assert 1 + sum(shapes_on_gpu.from_speed(12)) == pytest.approx(5.07, abs=0.005)
    assert 1 + sum(shapes_on_gpu.from_table(12)) == pytest.approx(6.7, abs=0.01)
    chances = [b / a for a, b in zip((1.0, *shapes_on_gpu.from_table(4)), shapes_on_gpu.from_table(4), strict=False)]
    assert sum(chances) / 4 == pytest.approx(0.88)
    assert shapes_on_gpu.from_speed(4) == shapes_on_gpu.from_speed(12)[:4]


def test_a_report_tells_which_weights_were_measured(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards figures that outlive their model: a folder may hold other weights tomorrow, a name say nothing."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    methods = ["--methods", f"ar,pard:draft={family / 'pard'}", "--no-compile", "--runs", 1, "--max-new-tokens", 4]
    asked = ["--prompts", tmp_path / "prompts.jsonl", "--num-prompts", 1, "--json", tmp_path / "out.json", *EXACT]
    assert paradraft("bench", "--target", family / "target", *methods, *asked).code == 0
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    plain, drafted = (figures["weights"] for figures in report["methods"].values())
    assert plain == {"target": model_digest(family / "target")[:16]}
    assert drafted == plain | {"draft": model_digest(family / "pard")[:16]}
    assert report["machine"]["git_revision"] != ""
    assert report["arguments"]["prompts"] == str(tmp_path / "prompts.jsonl")
    assert "1 prompt of prompts.jsonl × 4 tokens" in report["title"]

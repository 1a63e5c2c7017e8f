"""`paradraft plan`: from a benchmark's file to a table, a plot and lines for engines; and mistakes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from paradraft.plan import costs
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake
from tests.support.drafts import draft_of


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abcabc"}\n{"prompt": "xyzzy"}\n', encoding="utf-8")
    return file


def test_plan_from_a_benchmark(
    family: Path, paradraft: Paradraft, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way: the file that `bench` writes is read, and what is written can be read."""
    monkeypatch.setattr(costs, "VISITS", 1)
    monkeypatch.setattr(costs, "LEAST_S", 0.0)
    report, result, picture = tmp_path / "bench.json", tmp_path / "plan.json", tmp_path / "plan.png"
    models = ["--target", family / "target", "--draft", family / "pard", "--prompts", prompts, "--no-compile", *EXACT]
    size = ["--num-prompts", 2, "--max-new-tokens", 8]
    benched = paradraft("bench", *models, *size, "--methods", "pard:k=2:batch=2", "--runs", 1, "--json", report)
    assert benched.code == 0, benched.err
    asked = ["--acceptance", report, "--batch-size", 2, "--check", "--runs", 1, "--json", result, "--plot", picture]
    outcome = paradraft("plan", *models, *asked, "--seed", 3)
    assert outcome.code == 0, outcome.err
    assert "warning: --seed has no effect with --acceptance" in outcome.err
    assert outcome.err.count("warning") == 1
    assert "vs AR+" in outcome.out
    assert re.search(
        r"^pays from this acceptance length .*, batch 2: k=1 [\d.]+ \([\d.]+\), k=2 [\d.]+ ", outcome.out, re.M
    )
    last, plan = json.loads(outcome.out.splitlines()[-1]), json.loads(result.read_text(encoding="utf-8"))
    assert last["chosen"].keys() == {"2"}
    assert last["chains"] == plan["chains"]
    assert set(plan["costs_ms"]["2"]) == {"plain", "k=1", "k=2"}
    # At the beginning, after the one batch size, and after the check.
    assert len(plan["steadiness"]["plain_round_ms"]) == 3
    assert plan["steadiness"]["is_steady"] == ("unsteady machine" not in outcome.out)
    assert {one["way"] for one in plan["predictions"] if one["measured"]} >= {"plain", "k=2"}
    assert plan["acceptance"]["k=1"]["report"] == "bench.json"
    assert str(tmp_path) not in json.dumps(plan["acceptance"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sizes_of_ppd_are_planned_and_taken(
    family: Path, paradraft: Paradraft, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole way of a plan for PPD: it is written beside the checkpoint, and `generate` takes it."""
    monkeypatch.setattr(costs, "VISITS", 1)
    monkeypatch.setattr(costs, "LEAST_S", 0.0)
    draft, result = tmp_path / "draft", tmp_path / "plan.json"
    shutil.copytree(str(draft_of(family, "ppd")), draft)
    models = ["--target", family / "target", "--drafter", "ppd", "--draft", draft]
    size = ["--prompts", prompts, "--num-prompts", 2, "--max-new-tokens", 20, "--tree-budgets", "2,4,9", *EXACT]
    outcome = paradraft("plan", *models, *size, "--no-compile", "--check", "--runs", 1, "--json", result)
    assert outcome.code == 0, outcome.err
    assert f"plan written to {draft / 'plans.json'}" in outcome.out and "of the model" in outcome.out
    last, plan = json.loads(outcome.out.splitlines()[-1]), json.loads(result.read_text(encoding="utf-8"))
    assert last["chosen"] == plan["chosen"] in (2, 4, 9) and [row["size"] for row in plan["sizes"]] == [2, 4, 9]
    asked = ["--prompt", "abcabc", "--max-new-tokens", 12, *EXACT]
    answer, plain = paradraft("generate", *models, *asked), paradraft("generate", *models[:2], *asked)
    assert (answer.code, answer.out) == (0, plain.out) and "nothing is planned" not in answer.err
    assert (last["lossless"], last["speedup"]) == (True, plan["speedup"]) and "not lossless" not in outcome.out
    assert ("no size pays" in outcome.out) == (plan["speedup"] < 1)
    assert_mistake(paradraft("plan", *models, *size, "--k", "2"), "--k: ppd is planned by the size of its passes")


def test_a_lossy_plan_says_so_and_ignored_options_are_told(
    family: Path, paradraft: Paradraft, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the title and the last line, which is what a script reads, of a plan for typical acceptance."""
    monkeypatch.setattr(costs, "VISITS", 1)
    monkeypatch.setattr(costs, "LEAST_S", 0.0)
    draft = tmp_path / "draft"
    shutil.copytree(str(draft_of(family, "ppd")), draft)
    asked = ["--target", family / "target", "--drafter", "ppd", "--draft", draft, "--prompts", prompts, *EXACT]
    asked += ["--num-prompts", 2, "--max-new-tokens", 12, "--tree-budgets", 4, "--no-compile"]
    outcome = paradraft("plan", *asked, "--verify", "typical", "--seed", 3, "--runs", 4)
    assert outcome.code == 0, outcome.err
    assert "not lossless" in " ".join(outcome.out.split())
    assert json.loads(outcome.out.splitlines()[-1])["lossless"] is False
    assert "warning: --seed has no effect" in outcome.err and "warning: --runs has no effect" in outcome.err
    (draft / "plans.json").unlink()
    (draft / "plans.json").mkdir()
    refused = paradraft("plan", *asked)
    assert_mistake(refused, draft / "plans.json")
    assert "counting" not in refused.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--drafter", "none"], "nothing to plan"),
        (["--drafter", "lookahead"], "no K to plan"),
        (["--drafter", "oracle"], "oracle"),
        (["--draft", "x"], "takes no draft model"),
        (["--k", "0"], "--k 0"),
        (["--k", "4-2"], "--k 4-2"),
        (["--k", "1,,2"], "--k 1,,2"),
        (["--k", "300"], "k=300"),
        (["--tree-budget", "8,x"], "--tree-budget 8,x"),
        (["--tree-budgets", "8"], "chains only"),
        (["--batch-size", "1,none"], "--batch-size 1,none"),
        (["--batch-size", 2], "batches of 2"),
        (["--target", "shape:tiny-target"], "random weights"),
        (["--acceptance", "no-such-file.json"], "no-such-file.json"),
        (["--json", "no-such-folder/out.json"], "no-such-folder"),
        (["--plot", "out.pdf"], "out.pdf"),
        (["--num-prompts", 9], "num_prompts=9"),
    ],
)
def test_bad_plan_option(
    family: Path, paradraft: Paradraft, tmp_path: Path, arguments: list[object], named: str
) -> None:
    """Guards against measuring for minutes before a mistake is found."""
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text('{"prompt": "x"}\n', encoding="utf-8")
    asked = ["--drafter", "ngram", "--num-prompts", 1, "--prompts", prompts, "--json", result, "--no-compile", *EXACT]
    assert_mistake(paradraft("plan", "--target", family / "target", *asked, *arguments), named)
    assert not result.exists()


def test_a_report_of_something_else(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards against a plan from the acceptance of another drafter: what the file has is listed."""
    report = tmp_path / "bench.json"
    sampling = {"temperature": 0.0}
    arguments = {"target": str(family / "target"), "num_prompts": 1, "max_new_tokens": 4, "sampling": sampling}
    methods = {"hf": {"method": "hf"}, "pard:k=4": {"method": "pard"}}
    report.write_text(json.dumps({"methods": methods, "answers": {}, "arguments": arguments}), encoding="utf-8")
    outcome = paradraft("plan", "--target", family / "target", "--drafter", "ngram", "--acceptance", report)
    assert_mistake(outcome, "bench.json", "'ngram'", "hf, pard:k=4")

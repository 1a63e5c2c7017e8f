"""Options that have no effect are named, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import EXACT, Paradraft, assert_mistake, drafting
from tests.support.jsonl import write_lines


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"prompt": "hello"}])
    return file


def warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--top-p", 0.9], ["--top-p has no effect at temperature 0"]),
        (
            ["--top-k", 5, "--min-p", 0, "--seed", 3],
            [f"{name} has no effect at temperature 0" for name in ("--top-k", "--min-p", "--seed")],
        ),
        (["--top-p", 0.9, "--top-k", 5, "--seed", 3, "--temperature", 0.5], []),
        (
            ["-k", 8, "--verify", "rejection", "--lengths", "expected"],
            [f"{name} has no effect without a drafter" for name in ("-k", "--verify", "--lengths")],
        ),
        (["-k", 4, "--verify", "rejection", "--lengths", "expected", "--drafter", "ngram"], []),
        (
            ["-k", 4, "--verify", "match", "--lengths", "expected", "--drafter", "lookahead"],
            ["-k has no effect with this drafter, whose own settings say how deep it drafts"],
        ),
        (["--drafter", "forced"], ["--drafter has no effect without a JSON schema: this drafter is for serve"]),
        (["--drafter", "forced+ngram"], []),
        (["--batch-size", 8, "--json"], ["--batch-size has no effect without --prompts and --json"]),
        (["--logit-bias", "5=1", "--repetition-penalty", 1.1, "--stop", "q"], []),
    ],
)
def test_generate(family: Path, paradraft: Paradraft, options: list[object], expected: list[str]) -> None:
    """Guards against settings that a user believes in and that nothing reads; what is not given is not named."""
    outcome = paradraft("generate", *drafting(family, "none"), "--prompt", "hello", "--max-new-tokens", 4, *options)
    assert outcome.code == 0
    assert warnings(outcome.err) == [f"warning: {line}" for line in expected]
    assert "warning" not in outcome.out


def test_audit(family: Path, paradraft: Paradraft, prompts: Path) -> None:
    """Guards the options that audit has beyond those of generate."""
    asked = [
        *drafting(family, "ngram"),
        "--prompts",
        prompts,
        "--num-prompts",
        1,
        "--max-new-tokens",
        40,
        "--samples",
        2,
    ]
    outcome = paradraft("audit", *asked)
    assert outcome.code == 0
    assert outcome.err == "warning: --samples has no effect at temperature 0\n"
    assert paradraft("audit", *asked, "--temperature", 0.7).err == ""


def test_regenerate(family: Path, paradraft: Paradraft, prompts: Path, tmp_path: Path) -> None:
    """Guards the command whose options also depend on who answers."""
    asked = ["--prompts", prompts, "--out", tmp_path / "out.jsonl", "--max-new-tokens", 4, "--top-p", 0.5, "-k", 3]
    outcome = paradraft("regenerate", "--target", family / "target", *EXACT, *asked)
    assert outcome.code == 0
    assert warnings(outcome.err) == [
        "warning: --top-p has no effect at temperature 0",
        "warning: -k has no effect without a drafter",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--methods", "ar,ngram", "--draft", "nope", "--tree-budget", 3], ["--draft", "--tree-budget"]),
        (["--methods", "hf,ar", "-k", 3, "--lengths", "expected"], ["-k", "--lengths"]),
        (["--methods", "hf,ngram:k=3", "-k", 3, "--lengths", "expected"], ["-k"]),
        (["--methods", "ngram", "-k", 3, "--lengths", "expected", "--batch-size", 1, "--verify", "rejection"], []),
        (["--methods", "ar:dtype=float64", "--dtype", "float32"], ["--dtype"]),
    ],
)
def test_bench(family: Path, paradraft: Paradraft, prompts: Path, options: list[object], expected: list[str]) -> None:
    """Guards against a figure for a setting that no method has."""
    asked = ["--prompts", prompts, "--num-prompts", 1, "--max-new-tokens", 4, "--runs", 1, "--no-compile"]
    outcome = paradraft("bench", "--target", family / "target", *asked, *options)
    assert outcome.code == 0
    assert warnings(outcome.err) == [f"warning: {name} has no effect on any of these methods" for name in expected]


def test_bench_refuses_one_method_twice(family: Path, paradraft: Paradraft, prompts: Path) -> None:
    """Guards against a comparison of a method with itself under another spelling."""
    asked = ["--prompts", prompts, "--num-prompts", 1, "--target", family / "target"]
    outcome = paradraft("bench", *asked, "--methods", "ngram,ar,ngram:k=8")
    assert_mistake(outcome, "'ngram' and 'ngram:k=8' are the same")
    assert_mistake(paradraft("bench", *asked, "--methods", "ar", "--batch-size", "2,2"), "are the same")

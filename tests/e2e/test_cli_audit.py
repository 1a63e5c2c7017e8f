"""`paradraft audit` as a user meets it: its words, its exit code, its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from paradraft.audit.audit import accept_all
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import ForwardOut
from paradraft.verify import RULES
from tests.e2e.conftest import Paradraft, drafting
from tests.support.jsonl import write_lines


def audit_options(family: Path, tmp_path: Path) -> list[object]:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"prompt": text} for text in ["hello", "abcabcabc"]])
    return [*drafting(family, "pard"), "--prompts", file, "--num-prompts", 2, "--max-new-tokens", 20, "-k", 4]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temperature", 0.9, "--tree-budget", 8],
        ["--dtype", "bfloat16", "--shape-invariant"],
        ["--gamma", 4, "--temperature", 0.9, "--draft-cpus", min(os.sched_getaffinity(0))],
    ],
)
def test_audit_passes(family: Path, paradraft: Paradraft, tmp_path: Path, options: list[object]) -> None:
    """Guards the audit's words, exit code, last line and file."""
    file = tmp_path / "audit.json"
    outcome = paradraft("audit", *audit_options(family, tmp_path), *options, "--json", file)
    assert outcome.code == 0
    assert outcome.out.startswith("PASS: every answer has the tokens of plain decoding")
    assert "\n  from those of the model's own pass logits differ in plain decoding by " in outcome.out
    assert "\n  up to " in outcome.out
    written = json.loads(file.read_text())
    last = json.loads(outcome.out.splitlines()[-1])
    assert {key: written[key] for key in last} == last
    assert last["verdict"] == "PASS" and last["tokens"] == last["positions"]
    assert written["arguments"]["prompts"].endswith("prompts.jsonl")
    assert "\n  asked: 2 prompts of prompts.jsonl\n" in outcome.out
    assert written["arguments"]["k"] == 4 and written["machine"]["cpu_capability"]
    assert last["own_pass"]["drafted"]["largest"] <= last["own_pass"]["allowed"]["largest"]
    assert last["own_pass"]["places"] == last["tokens"]
    if "--shape-invariant" in options:
        assert last["bitwise_equal"] == last["positions"]


def test_audit_fails_with_exit_code_one(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards scripts that trust the exit code."""
    monkeypatch.setitem(RULES, "match", accept_all)
    outcome = paradraft("audit", *audit_options(family, tmp_path))
    assert outcome.code == 1
    assert outcome.out.startswith("FAIL: ")
    assert "NOT explained by rounding" in outcome.out
    assert outcome.err == ""


@pytest.mark.parametrize("options", [[], ["--temperature", 0.9, "--verify", "rejection"]])
def test_faults_of_passes_and_logits_that_are_not_numbers_have_exit_code_one(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[object]
) -> None:
    """Guards scripts against exit code 0 for passes that do not compute the model, and against tracebacks."""
    forward = CausalLM.forward
    for change, words in (
        (lambda logits: logits.roll(1, -1), "FAIL: with the drafter, logits differ from those of the model's own pass"),
        (lambda logits: logits * torch.nan, "FAIL: the target's logits are not numbers at prompt 1, seed 0, new token"),
    ):

        def faulty(lm: CausalLM, tokens: torch.Tensor, *parents: torch.Tensor, **others: torch.Tensor) -> ForwardOut:
            out = forward(lm, tokens, *parents, **others)
            is_targets = bool(parents) and tokens.shape[1] > 1
            return ForwardOut(logits=change(out.logits)) if is_targets else out  # noqa: B023  # called in the loop

        monkeypatch.setattr(CausalLM, "forward", faulty)
        outcome = paradraft("audit", *audit_options(family, tmp_path), *options)
        assert outcome.code == 1
        assert outcome.out.startswith(words)
        assert json.loads(outcome.out.splitlines()[-1])["verdict"] == "FAIL"
        assert outcome.err == ""

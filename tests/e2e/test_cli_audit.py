"""`paradraft audit` as a user meets it: its words, its exit code, its file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paradraft.audit.audit import accept_all
from paradraft.engine.loader import load
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import ForwardOut
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import pocket_folder
from tests.conftest import VOCAB, tiny_tokenizer
from tests.e2e.conftest import EXACT, Paradraft, assert_mistake, drafting
from tests.support.fake_engine import MODEL, Decoding, FakeEngine, Plain, Telling, greedy, one_by_one, pard
from tests.support.jsonl import write_lines
from tests.support.rules import replace_rule
from tests.support.serving import MODEL as OURS
from tests.support.serving import Serving, serving


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
    assert "\n  in plain decoding, logits are " in outcome.out
    assert "times as far from a finer pass as the model's own code is in " in outcome.out
    written = json.loads(file.read_text())
    last = json.loads(outcome.out.splitlines()[-1])
    assert {key: written[key] for key in last} == last
    assert last["verdict"] == "PASS" and last["tokens"] == last["positions"]
    assert written["arguments"]["prompts"].endswith("prompts.jsonl")
    assert "\n  asked: 2 prompts of prompts.jsonl\n" in outcome.out
    assert written["arguments"]["k"] == 4 and written["machine"]["cpu_capability"]
    drafted, most = last["own_pass"]["drafted"], last["own_pass"]["most"]
    assert 0 < drafted["worst"] <= most["at_a_place"] and drafted["measured"] == last["tokens"]
    assert drafted["sure"] and not drafted["overturned"] and not drafted["other_bits"]
    assert (last["own_pass"]["pass_in_cpp"] is None) == ("--shape-invariant" not in options)
    assert last["own_pass"]["places"] == last["tokens"]
    if "--shape-invariant" in options:
        assert last["bitwise_equal"] == last["positions"]


def test_audit_fails_with_exit_code_one(
    family: Path, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards scripts that trust the exit code."""
    replace_rule(monkeypatch, "match", accept_all)
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
        (lambda logits: logits.roll(1, -1), "FAIL: with the drafter, logits are not the model's: "),
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


@pytest.fixture(scope="module")
def ours(family: Path) -> Iterator[Serving]:
    """Our own server, with a drafter."""
    runtime = Runtime(dtype="float64", compiled=False, device="cpu")
    engine = load(
        str(family / "target"), drafter="pard", draft=str(family / "pard"), k=4, runtime=runtime, lengths="fixed"
    )
    with serving(engine, max_batch=4, max_queue=40) as found:
        yield found


@pytest.fixture
def fake(family: Path) -> Callable[..., FakeEngine]:
    """A server that somebody else wrote."""

    def engine(telling: Telling | None = None, **settings: Any) -> FakeEngine:
        target, draft = (
            AutoModelForCausalLM.from_pretrained(family / name, dtype=torch.float64) for name in ("target", "pard")
        )
        propose = partial(pard, draft, VOCAB + 1, 4, rows=VOCAB)
        decoding = {"target": Plain(target, rows=VOCAB), "ends": frozenset({0}), "propose": propose}
        return FakeEngine(
            decoding=Decoding(**decoding | settings), tokenizer=tiny_tokenizer(), telling=telling or Telling()
        )

    return engine


def served_options(family: Path, tmp_path: Path, url: str, model: str = MODEL) -> list[object]:
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"prompt": text} for text in ["hello", "abcabcabc", "xyz"]])
    return [
        "--endpoint", url, "--model", model, "--target", family / "target", *EXACT, "--prompts", file,
        "--num-prompts", 3, "--max-new-tokens", 20, "--samples", 0,
    ]  # fmt: skip


def test_the_audit_of_our_own_server_passes(family: Path, paradraft: Paradraft, tmp_path: Path, ours: Serving) -> None:
    """Guards the words, the exit code, the last line and the file of an audit that drafts are a part of."""
    file = tmp_path / "audit.json"
    options = served_options(family, tmp_path, f"{ours.url}/v1", OURS)
    outcome = paradraft("audit", family / "pard", *options, "--samples", 30, "-k", 4, "--json", file)
    assert outcome.code == 0, outcome.out
    assert outcome.out.startswith(
        "PASS: every greedy token is the likeliest of the model's own pass, and sampled ones have its distribution: "
    )
    assert "\n  93 answers, " in outcome.out and "(false alarms: 1e-06)" in outcome.out
    assert "\n  control, another temperature: was caught; over" in outcome.out
    assert "\n  accepted by position: " in outcome.out and "\n  asked: 3 prompts of prompts.jsonl\n" in outcome.out
    written, last = json.loads(file.read_text()), json.loads(outcome.out.splitlines()[-1])
    assert {key: written[key] for key in last} == last and last["verdict"] == "PASS"
    assert last["drafting"]["k"] == 4 and last["drafting"]["cause"] is None and last["preferences"] == []
    assert last["greedy_places"] == last["greedy_tokens"] and last["uniformity"]["tokens"] > 1000
    assert written["arguments"]["endpoint"].startswith("http://127.0.0.1:") and written["arguments"]["seeds"] == 30
    assert outcome.err == ""


def keep_all(rows: Any, drafted: list[int], draw: Any) -> list[int]:
    """A fault."""
    return [*drafted, greedy(rows(len(drafted)))]


def test_a_lossy_server_has_exit_code_one(
    family: Path, paradraft: Paradraft, tmp_path: Path, fake: Callable[..., FakeEngine]
) -> None:
    """Guards scripts that trust the exit code; the control that must be caught."""
    with fake(rule=keep_all) as server:
        outcome = paradraft("audit", *served_options(family, tmp_path, server.url))
    assert outcome.code == 1 and outcome.err == ""
    assert outcome.out.startswith("FAIL: 3 of 3 greedy answers hold tokens that are not the likeliest")
    assert "and the server itself, by what it tells, prefers another by up to" in outcome.out
    assert "NOT explained by rounding" in outcome.out
    assert json.loads(outcome.out.splitlines()[-1])["verdict"] == "FAIL"


def test_few_samples_and_faults_of_drafting_have_exit_code_one(
    family: Path, paradraft: Paradraft, tmp_path: Path, fake: Callable[..., FakeEngine]
) -> None:
    """Guards the word PASS: what shows nothing does not get it, nor does what drafts otherwise."""
    with fake() as server:
        outcome = paradraft("audit", *served_options(family, tmp_path, server.url), "--samples", 1)
    assert outcome.code == 1 and outcome.out.startswith("INCONCLUSIVE: the test of the distribution would not notice")
    with fake(propose=lambda text, prompt: [1] * 4) as server:
        outcome = paradraft("audit", family / "pard", *served_options(family, tmp_path, server.url), "-k", 4)
    assert outcome.code == 1 and outcome.out.startswith(
        "FAIL: the texts are the model's, but the server does not draft"
    )
    assert "no drafted token is ever accepted" in outcome.out


def test_how_many_tokens_a_server_drafts_need_not_be_told(
    family: Path, paradraft: Paradraft, tmp_path: Path, fake: Callable[..., FakeEngine]
) -> None:
    """Guards users who leave -k out: the default is no fault of the server."""
    with fake() as server:
        outcome = paradraft("audit", family / "pard", *served_options(family, tmp_path, server.url))
        assert outcome.code == 0, outcome.out
        assert 1 <= json.loads(outcome.out.splitlines()[-1])["drafting"]["k"] <= 4


def test_another_server_as_the_reference(
    family: Path, paradraft: Paradraft, tmp_path: Path, fake: Callable[..., FakeEngine], ours: Serving
) -> None:
    """Guards the audit without the target's weights here: of its folder only the tokenizer is read."""
    with fake() as server:
        options = served_options(family, tmp_path, server.url)
        beside = ["--reference-endpoint", f"{ours.url}/v1", "--reference-model", OURS]
        outcome = paradraft("audit", *options, *beside)
        assert outcome.code == 0, outcome.out
        assert "the likeliest of the reference server" in outcome.out
        warm = paradraft("audit", *options, *beside, "--samples", 1, "--temperature", 0.7)
        assert_mistake(warm, "--temperature 0.7", "leave it out")


def test_mistakes_in_the_audit_of_a_server(
    family: Path, paradraft: Paradraft, tmp_path: Path, fake: Callable[..., FakeEngine], ours: Serving
) -> None:
    """Guards users against tracebacks, and against settings that would change nothing."""
    with fake(Telling(tells_logprobs=False)) as silent:
        assert_mistake(paradraft("audit", *served_options(family, tmp_path, silent.url)), "gives no logprobs")
    assert_mistake(paradraft("audit", *served_options(family, tmp_path, silent.url)), silent.url, "cannot be reached")
    options = served_options(family, tmp_path, f"{ours.url}/v1", OURS)
    for others, words in {
        ("--model", "other"): ["has no model 'other'", OURS],
        ("--drafter", "pard"): ["--drafter has no meaning in the audit of a server"],
        ("--batch-size", 2): ["--batch-size has no meaning in the audit of a server"],
        ("--top-p", 0.9): ["--top-p has no meaning in the audit of a server"],
        ("--engine", "vllm"): ["either --endpoint or --engine"],
        ("--reference-model", "m"): ["need --reference-endpoint"],
        ("--reference-endpoint", f"{ours.url}/v1"): ["cannot be its own reference"],
        ("--num-prompts", 9): ["num_prompts=9", "1 to 3"],
        ("--max-new-tokens", 1000): ["1000"],
        ("--api-key-env", "NO_SUCH_KEY"): ["NO_SUCH_KEY"],
        ("nowhere/at/all",): ["nowhere/at/all"],
        ("pocket",): ["has a head that engines do not read", "paradraft export"],
        (family / "target" / "config.json",): ["config.json"],
    }.items():
        assert_mistake(paradraft("audit", *options, *others), *words)
    assert_mistake(paradraft("audit", *options[:2], *options[4:]), "--model")
    assert_mistake(paradraft("audit", *options[2:]), "--model is for the audit of a server")
    assert_mistake(
        paradraft("audit", family / "pard", *audit_options(family, tmp_path)), "is for the audit of a server"
    )


def test_drafts_that_no_engine_drafts_with_are_refused(
    family: Path, paradraft: Paradraft, tmp_path: Path, ours: Serving
) -> None:
    """Guards folders of other families, and masks outside the embedding."""
    options = served_options(family, tmp_path, f"{ours.url}/v1", OURS)
    for name, change in {
        "mask": {"mask_token_id": 999, "pard_token": 999},
        "name": {"mask_token_id": "<mask>"},
    }.items():
        folder = tmp_path / name
        shutil.copytree(family / "pard", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        assert_mistake(paradraft("audit", folder, *options), "mask token")
    shutil.copytree(family / "pard", tmp_path / "other")
    for file in pocket_folder("target").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "other" / file.name)
    assert_mistake(paradraft("audit", tmp_path / "other", *options), "another vocabulary")


def test_a_draft_need_be_no_parallel_one(
    family: Path, paradraft: Paradraft, tmp_path: Path, fake: Callable[..., FakeEngine]
) -> None:
    """Guards ordinary draft models, which draft one token a pass."""
    draft = AutoModelForCausalLM.from_pretrained(family / "draft", dtype=torch.float64)
    with fake(propose=partial(one_by_one, draft, 4, rows=VOCAB)) as server:
        outcome = paradraft("audit", family / "draft", *served_options(family, tmp_path, server.url), "-k", 4)
    assert outcome.code == 0, outcome.out
    assert json.loads(outcome.out.splitlines()[-1])["drafting"]["equal"] == 1.0

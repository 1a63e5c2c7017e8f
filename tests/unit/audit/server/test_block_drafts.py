"""How a server drafts with a block drafter: faults of engines, each named by the audit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.audit.server import block_drafts
from paradraft.audit.server.block_drafts import BlockDraft, BlockMode
from paradraft.audit.server.draft_causes import compare
from paradraft.audit.server.endpoint import AuditedServer
from paradraft.audit.server.endpoint_audit import audit_endpoint
from paradraft.audit.server.rounds import Round
from paradraft.audit.server.served import ServedReport
from paradraft.audit.server.tables import ModelReference
from paradraft.audit.verdict import FAIL, PASS
from paradraft.data.prompts import read_prompts
from paradraft.engine.loader import load
from paradraft.formats.head import Head, read_checkpoint, write_head
from paradraft.formats.path_heads import MARKOV_OUTPUT, SELECTOR_OUTPUT
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_tokenizer, pocket_folder
from paradraft.sources.target_loading import load_target
from tests.contract.test_every_trainee import recipe_for, train
from tests.support.jsonl import write_lines
from tests.support.quick import mostly_slow
from tests.support.serving import MODEL as OURS
from tests.support.serving import serving

K, MASK = 4, 0
RUNTIME = Runtime(dtype="float32", compiled=False, device="cpu")
PROMPTS = [str(record["prompt"])[:40] for record in read_prompts(pocket_folder("prompts.jsonl"))[:4]]
TOKENS = 60
KINDS: dict[str, dict[str, Any]] = {
    "causal, Markov head": {"markov_rank": 16},
    "whole, selector": {"causal": False, "anchor_first": False, "selector_rank": 16},
}


def trained(family: Path, out: Path, data: Path, **settings: Any) -> Head:
    settings = {
        "data": [str(data)],
        "k": K,
        "held_out": 0,
        "samples_per_step": 4,
        "optimizer": "muon",
        "max_length": 128,
    } | settings
    train("dflash", recipe_for("dflash", family, out, model="pocket", mask_token_id=MASK, lr=2e-3, **settings))
    return read_checkpoint(str(out))


def draft_of(head: Head) -> BlockDraft:
    target = load_target("pocket", RUNTIME)
    return BlockDraft(target=target, head=head, runtime=RUNTIME, k=K, is_k_known=True, special=(0, 1))


def faulty_rounds(draft: BlockDraft, mode: BlockMode, monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Rounds of texts that go on as drafts with a fault do, so that all of their tokens are accepted."""
    tokenizer, texts = load_tokenizer(str(pocket_folder("target"))), []
    for line in pocket_folder("text.jsonl").read_text().splitlines()[:4]:
        tokens = tokenizer(json.loads(line)["prompt"])["input_ids"]
        texts += [Round(prompt=8, text=tokens[:length], following=[], accepted=K) for length in range(20, 44, 6)]
    drafts: list[list[int]] = []

    def kept(rounds: list[Round], found: list[list[int]]) -> list[int]:
        drafts.extend(found)
        return [0] * len(rounds)

    with monkeypatch.context() as patched:
        patched.setattr(block_drafts, "accepted_of", kept)
        draft.accepted(texts, mode)
    return [replace(each, following=tokens) for each, tokens in zip(texts, drafts, strict=True)]


@pytest.fixture(scope="module", params=mostly_slow(KINDS, quick=["causal, Markov head"]))
def untrained(family: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> BlockDraft:
    """A drafter of random weights, whose drafts depend on all that it reads."""
    out = tmp_path_factory.mktemp("untrained") / "head"
    head = trained(family, out, pocket_folder("text.jsonl"), steps=1, **KINDS[request.param])
    name = MARKOV_OUTPUT if MARKOV_OUTPUT in head.weights else SELECTOR_OUTPUT
    noise = torch.randn(head.weights[name].shape, generator=torch.Generator().manual_seed(0))
    return draft_of(replace(head, weights=head.weights | {name: (0.1 * noise).bfloat16()}))


def check_named(draft: BlockDraft, name: str, mode: BlockMode, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(faulty_rounds(draft, mode, monkeypatch), draft, lambda _: None)
    assert found.cause is not None and found.cause.endswith(f"as many as with this fault: {name}"), name


def test_a_shifted_layout_is_named(untrained: BlockDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the commonest fault of engines, and against false alarms."""
    sound = compare(faulty_rounds(untrained, untrained.sound, monkeypatch), untrained, lambda _: None)
    assert sound.cause is None and sound.equal == 1.0 and sound.length == K + 1
    name, mode = next(iter(untrained.faults()))
    assert name.startswith("layout shifted by one")
    check_named(untrained, name, mode, monkeypatch)


@pytest.mark.slow
def test_each_fault_is_told_from_all_others(untrained: BlockDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the names of faults that users of engines have met."""
    faults = dict(untrained.faults())
    assert len(faults) > 10
    for name, mode in faults.items():
        check_named(untrained, name, mode, monkeypatch)


@pytest.fixture(scope="module")
def right(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Head:
    """Trained on the beginnings of the answers to the prompts, so that many drafted tokens are accepted."""
    folder = tmp_path_factory.mktemp("trained")
    answers = load("pocket", drafter="none", runtime=RUNTIME).generate(PROMPTS, max_new_tokens=TOKENS)
    records = [{"prompt": prompt, "response": each.text} for prompt, each in zip(PROMPTS, answers, strict=True)]
    write_lines(folder / "answers.jsonl", records)
    return trained(
        family, folder / "right", folder / "answers.jsonl", steps=60, warmup_steps=5, markov_rank=16, max_length=24
    )


def audited(served: Head, right: Head, folder: Path) -> ServedReport:
    """Audits our server, which drafts with one checkpoint, beside another."""
    folder.mkdir()
    write_head(folder, served)
    engine = load("pocket", drafter="dflash", draft=str(folder), k=K, runtime=RUNTIME, lengths="fixed")
    draft, tokenizer = draft_of(right), load_tokenizer(str(pocket_folder("target")))
    with serving(engine, max_batch=4, max_queue=40) as found:
        server = AuditedServer(url=f"{found.url}/v1", model=OURS, tokenizer=tokenizer, end_ids=draft.target.eos_ids)
        return audit_endpoint(
            server, ModelReference(draft.target.lm), PROMPTS, samples=0, max_new_tokens=TOKENS, temperature=1.0,
            seed=0, draft=draft, draft_tokenizer=None, report=lambda _: None,
        )  # fmt: skip


@pytest.mark.slow
def test_a_server_is_compared_with_the_drafter(right: Head, tmp_path: Path) -> None:
    """Guards the rounds of a real server: one that drafts as trained, and one that reads blocks in another layout."""
    report = audited(right, right, tmp_path / "right")
    assert report.verdict == PASS and report.drafting is not None
    assert report.drafting.cause is None and report.drafting.equal == 1.0
    assert report.drafting.rounds > 40 and report.drafting.length > 1.5
    wrong = replace(right, config=right.config | {"anchor_first": False})
    report = audited(wrong, right, tmp_path / "wrong")
    assert report.verdict == FAIL and report.drafting is not None and not report.preferences
    assert report.drafting.cause is not None and "with this fault: layout shifted by one" in report.drafting.cause

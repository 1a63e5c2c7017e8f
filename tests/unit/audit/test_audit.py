"""The audit must catch faults, and only faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paradraft.audit import audit as module
from paradraft.audit.audit import Report, audit, findings
from paradraft.audit.uniformity import accept_all, uniformity
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.drafters.parts.text_drafter import TextDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.forward import ForwardOut
from paradraft.models.runtime import Runtime
from paradraft.ragged import from_lists
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.verify import match
from tests.support.rules import replace_rule

PROMPTS = ["a", "helloworld", "abcabcabcabc"]
SAMPLED = Sampling(temperature=0.9, seed=3)
MANY = {"seeds": 20, "batch_size": 20}
"""What shows a distribution: 1,800 tokens, in rows that need few passes."""


def drafted(family: Path, dtype: str = "float64", **settings: object) -> Engine:
    runtime = Runtime(dtype=dtype, compiled=False)
    return load(str(family / "target"), drafter="pard", draft=str(family / "pard"), k=4, runtime=runtime, **settings)


def run(
    engine: Engine, sampling: Sampling = GREEDY, *, seeds: int = 2, tokens: int = 30, batch_size: int = 2
) -> Report:
    return audit(
        engine, PROMPTS, sampling=sampling, seeds=seeds, max_new_tokens=tokens, batch_size=batch_size,
        report=lambda _: None,
    )  # fmt: skip


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(repetition_penalty=1.2)])
def test_a_lossless_combination_passes(family: Path, sampling: Sampling) -> None:
    """Guards against false alarms, and against an audit that compares nothing."""
    report = run(drafted(family, tree=9), sampling)
    assert report.verdict == PASS and not report.divergences
    assert report.answers == (3 if sampling.is_greedy else 6)
    assert report.tokens == report.positions == report.answers * 30
    assert report.acceptance_length > 1.0
    assert report.largest_difference <= 4 * max(report.rounding or 0.0, 1e-12)


def lagging(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """A rule that keeps one token too many."""
    verdict = match.verify(draft, out, sampler)
    return accept_all(draft, out, sampler) if min(map(len, verdict.paths)) == 1 else verdict


@pytest.mark.parametrize("wrong", [accept_all, lagging])
def test_a_wrong_rule_fails(family: Path, wrong: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the word PASS: what is not lossless must not get it, nor be explained by rounding."""
    replace_rule(monkeypatch, "match", wrong)
    report = run(drafted(family))
    assert report.verdict == FAIL
    assert report.divergences and not all(found.is_tie for found in report.divergences)


def test_a_broken_cache_fails(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against faults in the logits themselves, which every rule then obeys honestly."""
    engine = drafted(family)
    accept_path = engine.target.lm.cache.accept_path

    def forgetful(paths: list[list[int]]) -> None:
        # The second slot that a round has written is lost.
        lm = engine.target.lm
        if max(map(len, paths)) > 1:
            for keys, values in lm.cache.storage:
                for row, length in enumerate(lm.cache.lengths):
                    keys[row, length + 1], values[row, length + 1] = 0.0, 0.0
        accept_path(paths)

    monkeypatch.setattr(engine.target.lm.cache, "accept_path", forgetful)
    report = run(engine, tokens=40)
    assert report.verdict == FAIL
    assert report.largest_difference > 1e-3


def test_near_ties_are_told_from_faults(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the three words: rounding as large as the difference explains it, smaller does not."""
    engine = drafted(family)
    lm = engine.target.lm
    with torch.no_grad():  # of any two tokens that are 32 apart, neither is likelier
        embedding = lm.model.get_input_embeddings().weight
        embedding[32:64] = embedding[:32]
    forward = lm.forward

    def rounded(tokens: torch.Tensor, *rest: object, **others: object) -> ForwardOut:
        logits = forward(tokens, *rest, **others).logits
        error = 1e-7 * torch.sin(torch.arange(logits.shape[-1])) if tokens.shape[1] > 1 else 0.0
        return ForwardOut(logits=logits + error)

    monkeypatch.setattr(lm, "forward", rounded)
    report = run(engine, tokens=60)
    assert report.verdict == TIES
    assert report.divergences and all(found.margin >= 0 for found in report.divergences)
    assert report.rounding == pytest.approx(1e-7, rel=0.01)
    assert report.bitwise_equal == 0
    lines = findings(report, engine.target.tokenizer)
    assert any("a near-tie" in line for line in lines)

    monkeypatch.setattr(module, "rounding_of", lambda *_: 1e-12)
    report = run(engine, tokens=60)
    assert report.verdict == FAIL
    assert any("NOT explained" in line for line in findings(report, engine.target.tokenizer))


def test_rejection_is_tested_with_a_control(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test of the distribution: it passes, its control fails, a wrong rule fails, and so does a test that
    sees too little to catch the control."""
    engine = drafted(family, verify="rejection")
    report = run(engine, SAMPLED, **MANY)
    assert report.verdict == PASS
    assert report.uniformity is not None and report.uniformity.tokens == report.tokens == 1800
    assert report.control is not None and not report.control.is_uniform
    short = run(engine, SAMPLED, seeds=1, tokens=2)
    assert short.verdict == INCONCLUSIVE and "not caught" in short.reason
    replace_rule(monkeypatch, "rejection", accept_all)
    assert run(engine, SAMPLED, **MANY).verdict == FAIL


def test_the_control_drafts_although_the_policy_does_not(family: Path) -> None:
    """Guards against a control that is not caught because the policy has learnt that drafting does not pay."""
    engine = drafted(family, verify="rejection")
    engine.lengths = Fixed(0)
    report = run(engine, SAMPLED, **MANY)
    assert report.acceptance_length == 1.0
    assert report.control is not None and not report.control.is_uniform
    assert report.verdict == INCONCLUSIVE and "nothing was drafted" in report.reason


def test_nothing_drafted_shows_nothing(family: Path) -> None:
    """Guards the word PASS: answers of one token are never drafted."""
    assert run(drafted(family), tokens=1).verdict == INCONCLUSIVE
    assert run(load(str(family / "target"), runtime=Runtime(dtype="float64")), tokens=1).verdict == PASS


class WrongDrafter(TextDrafter):
    """Drafts one token again and again."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """See `Drafter`."""
        return Draft.chain(from_lists([[self.token] * length for length in lengths], self.device))


def test_drafts_that_are_all_refused_show_nothing(family: Path) -> None:
    """Guards the word PASS: without an accepted token, nothing was kept of a draft that could be wrong."""
    honest = drafted(family)
    answers = honest.generate(PROMPTS, max_new_tokens=30)
    never = next(token for token in range(5, 30) if all(token not in answer.tokens for answer in answers))
    report = run(Engine(honest.target, WrongDrafter(never), Speculation(k=4, lengths="fixed")))
    assert report.acceptance_length == 1 and report.verdict == INCONCLUSIVE
    assert "drafted tokens was accepted, so this shows nothing" in report.reason


def test_answers_do_not_share_random_numbers(family: Path) -> None:
    """Guards the bound on false alarms, which is for independent answers: a prompt that stands in the file 16 times."""
    engine = drafted(family, verify="rejection")
    report = audit(
        engine, ["abcabc"] * 16, sampling=SAMPLED, seeds=1, max_new_tokens=30, batch_size=16, report=lambda _: None
    )
    assert report.verdict == PASS
    assert report.uniformity is not None and report.uniformity.distance < 0.7 * report.uniformity.limit


def test_a_drafter_that_drafts_nothing_is_not_tested_for_rejection(family: Path) -> None:
    """Guards against FAIL with the advice to use more prompts, which would not help."""
    engine = load(str(family / "target"), verify="rejection", runtime=Runtime(dtype="float64"))
    with pytest.raises(ValueError, match="drafts nothing"):
        run(engine, SAMPLED)


def test_an_impossible_token_fails() -> None:
    """Guards against a tested sample in which what cannot be has been dropped."""
    places = (torch.arange(20_000) + 0.5) / 20_000
    assert uniformity(places).is_uniform
    assert not uniformity(torch.cat([places, torch.tensor([2.0])])).is_uniform

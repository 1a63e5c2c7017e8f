"""Faults planted in an engine's passes: the audit must say FAIL, and of the same engines without them PASS.

An audit that measures rounding on the audited engine alone takes them for rounding: they are in all passes of more than
one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.audit.audit import Report, audit, findings
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import ForwardOut
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.kv_cache import Storage
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT, Tree
from paradraft.verify import match
from tests.conftest import tiny_model, tiny_tokenizer
from tests.support.pass_faults import Plant as PassFault
from tests.support.pass_faults import base, field, linear, logit_raised, without_panel
from tests.support.rules import replace_rule

PROMPTS = ["helloworld", "abcabcabcabc", "a"]
SAMPLED = Sampling(temperature=0.9, seed=3)
EAGER = ("float64", "float32", "bfloat16")
NATIVE = ("float32 C++", "bfloat16 C++")
NEAR = 0.05
"""A difference between two logits, a few times what bfloat16 rounds away here."""
Load = Callable[..., Engine]
Plant = Callable[[CausalLM, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def loaded(family: Path) -> Load:
    """Loads an engine once for all tests, "float32 C++" with passes in C++; no test changes its weights."""

    @cache
    def engine(name: str, *, tree: int | None = None, verify: str = "match") -> Engine:
        dtype, *native = name.split()
        runtime = Runtime(dtype=dtype, compiled=None if native else False)
        target, draft = str(family / "target"), str(family / "pard")
        found = load(
            target, drafter="pard", draft=draft, k=4, tree=tree, verify=verify, runtime=runtime, lengths="fixed"
        )
        if native and not found.target.lm.is_native:
            pytest.skip("no passes in C++ here")
        return found

    return engine


def run(engine: Engine, sampling: Sampling = GREEDY, *, seeds: int = 1, tokens: int = 16) -> Report:
    return audit(
        engine, PROMPTS, sampling=sampling, seeds=seeds, max_new_tokens=tokens, batch_size=2, report=lambda _: None
    )


def logits_changed(change: Callable[[Tensor], Tensor], *, from_width: int = 2) -> Plant:
    """The logits of passes of at least so many tokens are changed."""

    def plant(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = lm.forward

        def faulty(tokens: Tensor, *rest: Tensor, **others: Any) -> ForwardOut:
            out = forward(tokens, *rest, **others)
            return ForwardOut(logits=change(out.logits)) if tokens.shape[1] >= from_width else out

        monkeypatch.setattr(lm, "forward", faulty)

    return plant


def shifted(logits: Tensor) -> Tensor:
    """By one id."""
    return logits.roll(1, -1)


def noise(deviation: float) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda logits: logits + deviation * torch.randn(logits.shape, generator=generator)


def around_wide_passes(lm: CausalLM, monkeypatch: pytest.MonkeyPatch, before: Callable[[Tensor], None]) -> list[bool]:
    """Calls `before` before each pass of several tokens; the result holds True while such a pass runs."""
    forward, inside = lm.forward, [False]

    def faulty(tokens: Tensor, *rest: Tensor, **others: Any) -> ForwardOut:
        inside[0] = tokens.shape[1] > 1
        if inside[0]:
            before(tokens)
        out = forward(tokens, *rest, **others)
        inside[0] = False
        return out

    monkeypatch.setattr(lm, "forward", faulty)
    return inside


def blind_drafts(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens see the root and themselves, not the drafted tokens before them."""
    inside = around_wide_passes(lm, monkeypatch, lambda _: None)
    if lm.is_native:
        run_pass = lm._pass

        def without_parents(
            storage: Storage, lengths: list[int], tokens: Tensor, parents: Tensor, *rest: Any
        ) -> ForwardOut:
            return run_pass(storage, lengths, tokens, parents.clamp(max=0) if inside[0] else parents, *rest)

        monkeypatch.setattr(lm, "_pass", without_parents)
        return
    inputs = lm._compute._inputs

    def masked(*arguments: object) -> tuple[Tensor, ...]:
        *others, sees = inputs(*arguments)
        if inside[0]:
            sees = torch.eye(sees.shape[1], dtype=torch.bool).expand_as(sees).clone()
            sees[:, :, 0] = True
        return *others, sees

    monkeypatch.setattr(lm._compute, "_inputs", masked)


def rejected_tokens_stay(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of one rejected token stay in the cache."""
    last: list[Tensor] = []
    around_wide_passes(lm, monkeypatch, lambda tokens: last.__setitem__(slice(None), [tokens]))
    accept_path = lm.cache.accept_path

    def keep_more(paths: list[list[int]]) -> None:
        if last:
            (tokens,) = last
            there = [[node for node, token in enumerate(row) if token != ABSENT] for row in tokens.tolist()]
            paths = [
                path + [node for node in nodes if node not in path][:1]
                for path, nodes in zip(paths, there, strict=True)
            ]
            last.clear()
        accept_path(paths)

    monkeypatch.setattr(lm.cache, "accept_path", keep_more)


def positions_off_by_one(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of wide passes are rotated as if they stood one place further."""
    if lm.is_native:
        inside = around_wide_passes(lm, monkeypatch, lambda _: None)

        class Further(NativePass):
            def __call__(self, *arguments: Any, **others: Any) -> ForwardOut:
                turned = inside[0] * 4 * self._model.head_size // 2
                self._model.cosines, self._model.sines = self._model.cosines + turned, self._model.sines + turned
                out = super().__call__(*arguments, **others)
                self._model.cosines, self._model.sines = self._model.cosines - turned, self._model.sines - turned
                return out

        monkeypatch.setattr(lm._compute, "__class__", Further)
        return
    inside = around_wide_passes(lm, monkeypatch, lambda _: None)
    inputs = lm._compute._inputs

    def moved(*arguments: object) -> tuple[Tensor, ...]:
        *others, depth, sees = inputs(*arguments)
        return *others, depth + inside[0], sees

    monkeypatch.setattr(lm._compute, "_inputs", moved)


def other_rows_cache(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row of a batch reads what the first row has written."""

    def copy(tokens: Tensor) -> None:
        if len(tokens) > 1:
            common = min(lm.cache.lengths[:2])
            for layer in lm.cache.storage:
                for stored in layer:
                    stored[1, :common] = stored[0, :common]

    around_wide_passes(lm, monkeypatch, copy)


FAULTS: dict[str, Plant] = {
    "shifted ids": logits_changed(shifted),
    "noise of 0.5": logits_changed(noise(0.5)),
    "blind drafts": blind_drafts,
    "rejected tokens stay": rejected_tokens_stay,
    "positions off by one": positions_off_by_one,
    "another row's cache": other_rows_cache,
}


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=pytest.mark.slow if dtype.startswith("float32") else ()) for dtype in (*EAGER, *NATIVE)],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_wide_passes_fails(loaded: Load, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: str) -> None:
    """Guards against faults that were taken for rounding, which was measured on passes that have them."""
    engine = loaded(dtype)
    FAULTS[fault](engine.target.lm, monkeypatch)
    report = run(engine)
    assert report.verdict == FAIL, report
    assert "plain decoding itself" not in report.reason
    if "C++" in dtype:
        assert "C++ give the same logits to the last bit" in report.reason
    assert (own := report.own_pass) is not None and own.plain is not None and own.fault(own.plain) is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float32 C++"])
def test_a_little_noise_fails(loaded: Load, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Guards against a bound that is right for bfloat16 only: noise of 0.02 is 10,000 times what float32 rounds."""
    engine = loaded(dtype)
    logits_changed(noise(0.02))(engine.target.lm, monkeypatch)
    assert run(engine).verdict == FAIL


@pytest.mark.parametrize("dtype", [*EAGER, *NATIVE])
@pytest.mark.parametrize("fault", [shifted, noise(0.5)])
def test_a_fault_of_all_passes_fails(
    loaded: Load, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: Callable[[Tensor], Tensor]
) -> None:
    """Guards against two sides that agree because both are wrong."""
    engine = loaded(dtype)
    logits_changed(fault, from_width=1)(engine.target.lm, monkeypatch)
    report = run(engine)
    assert report.verdict == FAIL
    assert report.reason.startswith("plain decoding itself is not the model's")


IN_ALL_PASSES: dict[str, PassFault] = {
    "epsilon of 1e-3": field(epsilon=lambda _: 1e-3),
    "scores times 1.05": field(scale=lambda scale: scale * 1.05),
    "base times 0.9": base(0.9),
    "base times 0.5": base(0.5),
    "3 added to a logit": logit_raised,
    "a sixteenth of the outputs": linear("o_proj", without_panel),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("fault", IN_ALL_PASSES)
def test_a_fault_of_the_pass_in_cpp_fails(
    family: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, fault: str
) -> None:
    """Guards against a bound on the difference between two passes: one in 16 bits differs from another by more than
    each of these does, and so an audit took all of them for rounding."""

    def plant(native: NativePass, model: PreTrainedModel, probe: str | None) -> str:
        IN_ALL_PASSES[fault](native, model)
        return ""

    monkeypatch.setattr(NativePass, "_check", plant)
    engine = load(str(family / "target"), drafter="ngram", k=4, runtime=Runtime(dtype=dtype), lengths="fixed")
    if not engine.target.lm.is_native:
        pytest.skip("no passes in C++ here")
    report = run(engine)
    assert report.verdict == FAIL
    assert report.reason.startswith("plain decoding itself is not the model's: the pass in C++ does not compute")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("from_width", [1, 2])
def test_logits_of_passes_in_cpp_that_are_changed_afterwards_fail(
    loaded: Load, monkeypatch: pytest.MonkeyPatch, dtype: str, from_width: int
) -> None:
    """Guards what is done to logits after a pass: a change of one id that is far below rounding, the same in all
    passes, so that both sides agree to the last bit."""

    def change(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., 7] += 1e-3
        return logits

    engine = loaded(f"{dtype} C++")
    logits_changed(change, from_width=from_width)(engine.target.lm, monkeypatch)
    report = run(engine)
    assert report.verdict == FAIL
    if from_width == 1:
        assert "its logits are not those of one pass in C++ over the same text" in report.reason


def test_another_choice_where_a_finer_pass_is_sure_fails(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the choice of tokens where their logits are wrong by no more than a few times what is rounded away."""

    def turn(logits: Tensor) -> Tensor:
        """Exchanges the two largest logits where they are near each other."""
        best, ids = logits.topk(2, dim=-1)
        is_near = best[..., :1] - best[..., 1:] < NEAR
        return logits.scatter(-1, ids, torch.where(is_near, best.flip(-1), best))

    engine = loaded("bfloat16")
    logits_changed(turn, from_width=1)(engine.target.lm, monkeypatch)
    report = run(engine, SAMPLED, seeds=4)
    assert report.verdict == FAIL
    assert "sure of a token, another one has the largest logit" in report.reason


def test_a_wrong_choice_on_both_sides_fails(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rule that is wrong without a draft too: the logits are right and both sides agree."""

    def second_best(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        best = out.logits.argmax(-1, keepdim=True)
        return match.verify(draft, TargetOut(logits=out.logits.scatter(-1, best, -torch.inf), hidden={}), sampler)

    replace_rule(monkeypatch, "match", second_best)
    report = run(loaded("float64"))
    assert report.verdict == FAIL and not report.divergences
    assert "not those that" in report.reason


@pytest.mark.parametrize("fault", [shifted, noise(0.5), noise(0.02)])
def test_a_fault_fails_under_the_rejection_rule(
    loaded: Load, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], Tensor]
) -> None:
    """Guards against a fault too small for the test of the distribution: its logits are not the model's."""
    engine = loaded("float32", verify="rejection")
    logits_changed(fault)(engine.target.lm, monkeypatch)
    report = run(engine, SAMPLED, seeds=2)
    assert report.verdict == FAIL
    assert "with the drafter, logits are not the model's" in report.reason
    assert report.own_pass is not None and report.own_pass.plain is None


@pytest.mark.parametrize("dtype", [*EAGER, "float16", "int8", *NATIVE, "int8 C++"])
def test_an_honest_engine_passes(loaded: Load, dtype: str) -> None:
    """Guards against false alarms, chains and trees, greedy and sampled, and says what was compared."""
    for tree, sampling in ((None, GREEDY), (9, SAMPLED)):
        report = run(loaded(dtype, tree=tree), sampling)
        assert report.verdict in ([PASS] if "C++" in dtype else [PASS, TIES]), report
        own = report.own_pass
        assert own is not None and own.rounding is not None and own.plain is not None
        assert own.places == report.tokens == 48
        assert 0 < own.rounding.root_mean_square < own.limit.root_mean_square
        for side in (own.plain, own.drafted):
            assert side.mean is not None and side.worst is not None
            assert side.mean < own.most.over(side.measured) / 1.3 and side.worst < own.most.at_a_place / 2
            assert side.measured == 48 and side.sure and not side.overturned and not side.other_bits
        assert (own.pass_in_cpp is not None) == ("C++" in dtype)
        lines = findings(report, loaded(dtype, tree=tree).target.tokenizer)
        assert any(line.startswith("  in plain decoding, logits are") and own.dtype in line for line in lines)
        assert any(line.startswith("  the pass in C++: formula") for line in lines) == ("C++" in dtype)


def test_rounding_without_bounds_is_inconclusive(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a dtype so coarse for a model that any fault is within its rounding."""
    monkeypatch.setattr("paradraft.audit.reference.MOST_TYPICAL", {torch.bfloat16: 1e-4})
    report = run(loaded("bfloat16 C++"))
    assert report.verdict == INCONCLUSIVE
    assert "audit in a finer dtype" in report.reason


def test_weights_without_another_dtype_are_held_to_the_limit(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards quantized weights whose rounding cannot be measured: the report says so, and a fault still fails."""
    monkeypatch.setattr("paradraft.audit.own_pass.can_compute_otherwise", lambda _: False)
    engine = loaded("float32")
    report = run(engine)
    assert report.verdict == PASS
    assert (own := report.own_pass) is not None and own.rounding is None and own.plain is not None
    assert own.plain.mean is None and own.plain.distance.within(own.limit)
    assert any("from the model's own pass" in line for line in findings(report, engine.target.tokenizer))
    logits_changed(noise(0.02))(engine.target.lm, monkeypatch)
    assert run(engine).verdict == FAIL


@dataclass(frozen=True)
class Broken:
    """Logits that are wrong at one row of a pass."""

    value: float
    row: int

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[:, self.row] = self.value
        return logits


@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("from_width", [1, 2])
def test_logits_that_are_not_numbers_are_a_verdict(
    loaded: Load, monkeypatch: pytest.MonkeyPatch, verify: str, value: float, from_width: int
) -> None:
    """Guards against a traceback, and against PASS for a text of tokens that were not chosen."""
    engine = loaded("float64", verify=verify)
    logits_changed(Broken(value, 0), from_width=from_width)(engine.target.lm, monkeypatch)
    report = run(engine, SAMPLED)
    assert report.verdict == FAIL
    assert report.reason == "the target's logits are not numbers at prompt 1, seed 3, new token 0, with the drafter"
    assert findings(report, engine.target.tokenizer)[0] == f"FAIL: {report.reason}"


def test_an_engine_that_refuses_to_choose_is_a_verdict(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against exit code 2, a user's mistake, where an engine raises ValueError for logits that are not numbers;
    other errors stay what they are."""

    def refusing(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        if bool(out.logits.isnan().any()):
            raise ValueError("the target's logits are not numbers")
        return match.verify(draft, out, sampler)

    def failing(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        raise ValueError("something else")

    engine = loaded("float64")
    replace_rule(monkeypatch, "match", failing)
    with pytest.raises(ValueError, match="something else"):
        run(engine)
    replace_rule(monkeypatch, "match", refusing)
    logits_changed(Broken(torch.nan, -1))(engine.target.lm, monkeypatch)
    report = run(engine)
    assert report.verdict == FAIL and "logits are not numbers at prompt 1" in report.reason


def test_a_rejected_guess_may_be_followed_by_anything(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a fault found where no token was chosen: after a rejected guess there is no text."""
    engine = loaded("float64")
    verify = match.verify

    def spoilt(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        verdict = verify(draft, out, sampler)
        for row, path in enumerate(verdict.paths):
            rejected = [node + 1 for node in range(draft.tokens.shape[1]) if node not in path]
            out.logits[row, rejected] = torch.nan
        return verdict

    replace_rule(monkeypatch, "match", spoilt)
    assert run(engine).verdict == PASS


def test_a_model_of_nan_is_a_verdict(tmp_path: Path) -> None:
    """Guards against a traceback for weights that were damaged or diverged in training."""
    model = tiny_model(1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for drafter, verify in (("none", "match"), ("ngram", "rejection")):
        engine = load(str(tmp_path), drafter=drafter, verify=verify, runtime=Runtime(dtype="float64"), lengths="fixed")
        report = run(engine, SAMPLED)
        assert report.verdict == FAIL
        assert "logits are not numbers at prompt 1, seed 3, new token 0" in report.reason


def test_fixed_trees_and_batches_are_honest(loaded: Load) -> None:
    """Guards against false alarms for drafts that are padded and rows that end early."""
    chains = loaded("float32")
    engine = Engine(
        chains.target, chains.drafter, Speculation(k=3, tree=Tree(paths=((0,), (1,), (0, 0), (0, 1))), lengths="fixed")
    )
    assert run(engine, SAMPLED, seeds=2).verdict in (PASS, TIES)

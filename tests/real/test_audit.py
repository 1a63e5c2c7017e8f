"""`paradraft audit` of real models: an honest engine passes, and faults planted in its passes fail."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from paradraft.audit.audit import Report, audit
from paradraft.audit.verdict import FAIL, PASS
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.cpu.self_check import MOST_ROUNDING, distances, readings_of
from paradraft.sampling_params import GREEDY
from tests.real.conftest import CODE, CODER_05B, QUESTIONS, SMOLLM2, TEXT, check_is_fast, real
from tests.support.pass_faults import FAULTS, WHERE_ROUNDED, Plant, base, field

pytestmark = pytest.mark.real
PROMPTS = [CODE, "one two three four one two three four one two three"]
FOLDER = "smollm2-135m-instruct"
HIDDEN: dict[str, Plant] = {
    "epsilon of 1e-3": field(epsilon=lambda _: 1e-3),
    "scores times 1.05": field(scale=lambda scale: scale * 1.05),
    "base times 0.9": base(0.9),
    "base times 0.5": base(0.5),
    "3 added to a logit": FAULTS["3 added to a logit"],
}
"""What an audit once took for the rounding of bfloat16 and of few bits."""
NO_FAULTS_HERE = ("two ids swapped", "one position off")
"""Of ids that the texts do not have; of all positions, of which only differences count."""
PLANTED = [(FOLDER, "bfloat16", fault) for fault in FAULTS | HIDDEN if fault not in NO_FAULTS_HERE]
PLANTED += [(name, dtype, fault) for name, dtype in ((FOLDER, "float32"), (SMOLLM2, "auto")) for fault in HIDDEN]
PLANTED += [
    (name, dtype, fault) for name, dtype in ((FOLDER, "bfloat16"), (SMOLLM2, "auto")) for fault in WHERE_ROUNDED
]


def loaded(name: str, dtype: str) -> Engine:
    engine = load(real(name), drafter="ngram", k=4, dtype=dtype, lengths="fixed")
    check_is_fast(engine)
    return engine


def run(engine: Engine, prompts: list[str] = PROMPTS) -> Report:
    return audit(
        engine, prompts, sampling=GREEDY, seeds=1, max_new_tokens=24, batch_size=2, report=lambda _: None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(FOLDER, "float32"), (FOLDER, "bfloat16"), (FOLDER, "int8"), (SMOLLM2, "auto"), (CODER_05B, "auto")],
)
def test_an_honest_engine_passes(name: str, dtype: str) -> None:
    """Guards against false alarms on real weights, whose logits are rougher than those of random ones, with room to
    the limits."""
    report = run(loaded(name, dtype))
    assert report.verdict == PASS, report
    own = report.own_pass
    assert own is not None and own.pass_in_cpp is not None and own.plain is not None
    assert own.plain.mean is not None and own.plain.mean < own.most.over(own.plain.measured) / 1.3
    assert own.plain.worst is not None and own.plain.worst < own.most.at_a_place / 2
    assert own.plain.distance.largest < own.explained.largest / 2
    assert own.plain.sure and not own.plain.overturned and not own.plain.other_bits


@pytest.mark.parametrize(("name", "dtype"), [(FOLDER, "bfloat16"), (SMOLLM2, "auto"), (CODER_05B, "auto")])
def test_a_long_text_is_no_fault(name: str, dtype: str) -> None:
    """Guards honest engines: what flips at one place changes keys and values, and with them all later places."""
    report = run(loaded(name, dtype), [" ".join([*QUESTIONS, CODE, TEXT])])
    assert report.own_pass is not None and report.own_pass.pass_in_cpp is not None
    assert report.verdict == PASS and report.own_pass.pass_in_cpp.layer < 1, report


def test_one_place_is_no_fault() -> None:
    """Guards honest engines and short answers against a bound on the mean of many places: at one place in 25 a right
    pass is more than 2.5 times as far from the exact one as the model's own code. The first place, where it is 4.2
    times on some CPUs, is all of its text."""
    engine = load(real(SMOLLM2))
    lm = engine.target.lm
    assert lm.native is not None
    tokens = engine.chat_tokens([{"role": "user", "content": QUESTIONS[0]}])
    text_N = torch.tensor(tokens + engine.generate(tokens, max_new_tokens=64).tokens)
    logits_NV = lm.native.logits_at(text_N, torch.arange(len(text_N)))
    readings = readings_of(lm.model, lm.native, text_N, torch.arange(len(text_N)), logits_NV)
    assert readings.rounded is not None
    ratios_N = distances(logits_NV, readings.exact) / distances(readings.rounded, readings.exact)
    place = int(ratios_N.argmax())
    assert ratios_N[place] > MOST_ROUNDING, "no place shows it"
    prompt = engine.target.tokenizer.decode(text_N[: place + 1])
    report = audit(engine, [prompt], sampling=GREEDY, seeds=1, max_new_tokens=1, batch_size=1, report=lambda _: None)
    assert report.verdict != FAIL, report


@pytest.mark.parametrize(("name", "dtype", "fault"), PLANTED)
def test_a_fault_fails(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, fault: str) -> None:
    """Guards against an audit that takes a wrong pass for rounding: both sides have the fault and agree."""

    def plant(native: NativePass, model: PreTrainedModel, probe: str | None) -> str:
        (FAULTS | HIDDEN | WHERE_ROUNDED)[fault](native, model)
        return ""

    monkeypatch.setattr(NativePass, "_check", plant)
    report = run(loaded(name, dtype), PROMPTS[:1])
    assert report.verdict == FAIL and report.reason.startswith("plain decoding itself is not the model's")

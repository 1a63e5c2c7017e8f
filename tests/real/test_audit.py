"""`paradraft audit` of real models: an honest engine passes, and faults planted in its passes fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paradraft.audit.audit import Report, audit
from paradraft.audit.verdict import FAIL, PASS
from paradraft.engine import Engine
from paradraft.loader import load
from paradraft.sampling_params import GREEDY
from tests.real.conftest import CODE, CODER_05B, CODER_15B, SMOLLM2, check_is_fast, real

pytestmark = pytest.mark.real
PROMPTS = [CODE, "The lake is blue because"]
Plant = Callable[[Any, pytest.MonkeyPatch], None]


def epsilon(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm adds a hundred times as much."""
    monkeypatch.setattr(model, "epsilon", model.epsilon * 100)


def scale(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of attention are a tenth larger."""
    monkeypatch.setattr(model, "scale", model.scale * 1.1)


def norms(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has the norm of the layer after it."""
    monkeypatch.setattr(model.layer[3], "norm", model.layer[4].norm)


FAULTS: dict[str, Plant] = {"epsilon": epsilon, "scale": scale, "norms": norms}


@pytest.fixture(
    scope="module",
    params=[(SMOLLM2, "auto"), (CODER_05B, "auto"), (CODER_15B, "auto"), ("smollm2-135m-instruct", "float32")],
    ids=lambda target: "-".join(target),
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each file, and a folder in float32, with the n-gram drafter."""
    name, dtype = request.param
    found = load(real(name), drafter="ngram", k=4, dtype=dtype)
    check_is_fast(found)
    return found


def run(engine: Engine) -> Report:
    return audit(
        engine, PROMPTS, sampling=GREEDY, seeds=1, max_new_tokens=12, batch_size=2, report=lambda _: None
    )  # fmt: skip


def test_an_honest_engine_passes(engine: Engine) -> None:
    """Guards against false alarms on real weights, whose logits are rougher than those of random ones."""
    report = run(engine)
    assert report.verdict == PASS, report


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Guards against an audit that takes a wrong pass for rounding: both sides have the fault and agree."""
    FAULTS[fault](engine.target.lm._compute._model, monkeypatch)
    report = run(engine)
    assert report.verdict == FAIL, report
    assert report.reason.startswith("plain decoding itself is not the model's")

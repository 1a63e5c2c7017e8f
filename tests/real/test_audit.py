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
from tests.real.conftest import CODE, SMOLLM2, check_is_fast, real

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


def large_epsilon(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm adds ten thousand times as much."""
    monkeypatch.setattr(model, "epsilon", model.epsilon * 10_000)


IN_FLOAT32: dict[str, Plant] = {"epsilon": epsilon, "scale": scale, "norms": norms}


@pytest.fixture(scope="module")
def folder() -> Engine:
    """A folder in float32, with the n-gram drafter."""
    return loaded("smollm2-135m-instruct", "float32")


@pytest.fixture(scope="module")
def file() -> Engine:
    """The smallest file: the audit of a larger one takes many minutes, as the model's own code unpacks its weights."""
    return loaded(SMOLLM2, "auto")


def loaded(name: str, dtype: str) -> Engine:
    engine = load(real(name), drafter="ngram", k=4, dtype=dtype)
    check_is_fast(engine)
    return engine


def run(engine: Engine) -> Report:
    return audit(
        engine, PROMPTS, sampling=GREEDY, seeds=1, max_new_tokens=12, batch_size=2, report=lambda _: None
    )  # fmt: skip


def fails(engine: Engine) -> bool:
    report = run(engine)
    return report.verdict == FAIL and report.reason.startswith("plain decoding itself is not the model's")


def test_an_honest_folder_passes(folder: Engine) -> None:
    """Guards against false alarms on real weights, whose logits are rougher than those of random ones."""
    report = run(folder)
    assert report.verdict == PASS, report


@pytest.mark.parametrize("fault", IN_FLOAT32)
def test_a_fault_of_a_folder_fails(folder: Engine, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Guards against an audit that takes a wrong pass for rounding: both sides have the fault and agree."""
    IN_FLOAT32[fault](folder.target.lm._compute._model, monkeypatch)
    assert fails(folder)


def test_a_file_passes_and_with_a_fault_it_fails(file: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the audit of weights in few bits, whose rounding is allowed more, but not a root mean square of 6."""
    report = run(file)
    assert report.verdict == PASS, report
    large_epsilon(file.target.lm._compute._model, monkeypatch)
    assert fails(file)

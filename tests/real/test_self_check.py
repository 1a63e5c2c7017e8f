"""The self-check of passes in C++ accepts real models, and none of the faults that it may meet."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from paradraft.models.forward.cpu.matrix import WrongPassError
from paradraft.models.forward.cpu.model import NativePass
from paradraft.models.forward.cpu.self_check import figures_of, text_for
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target
from tests.real.conftest import CODER_05B, CODER_15B, SMOLLM2, TARGETS, real
from tests.support.pass_faults import FAULTS, WHERE_ROUNDED, WITH_BIASES, WITH_OFFSETS, Plant, faulty, unchanged

pytestmark = pytest.mark.real


def model_of(name: str, dtype: str = "auto") -> PreTrainedModel:
    return load_target(real(name), Runtime(device="cpu", dtype=dtype)).lm.model


@pytest.mark.parametrize(("name", "dtype"), TARGETS)
def test_right_passes_are_accepted(name: str, dtype: str) -> None:
    """Guards the fast path, with room to the limits: one that is just kept is a matter of luck."""
    model = model_of(name, dtype)
    native = NativePass(model)
    found = figures_of(model, native, native.logits_at(*text_for(model)))
    assert found.formula < 2 and found.worst < 8 and found.kernel < 2.5e-6 and found.rounding < 1.8, found
    assert found.layer < 1 and found.head < 0.3, found


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        (SMOLLM2, FAULTS | WITH_OFFSETS | WHERE_ROUNDED),
        (CODER_05B, FAULTS | WITH_BIASES | WITH_OFFSETS | WHERE_ROUNDED),
        (CODER_15B, FAULTS | WITH_BIASES | WITH_OFFSETS | WHERE_ROUNDED),
    ],
)
def test_wrong_passes_are_refused(name: str, faults: dict[str, Plant]) -> None:
    """Guards against a check that refuses nothing of a trained model, whose states a few channels rule."""
    model, accepted = model_of(name), []
    for fault, plant in faults.items():
        try:
            faulty(plant)(model)
            accepted.append(fault)
        except WrongPassError:
            pass
    assert not accepted
    faulty(unchanged)(model)

"""The draft that is shipped for the 1.5B file: `auto` names it for no other model, and it drafts as it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradraft.engine.automatic import automatic
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.quantized import QuantizedTensor
from tests.e2e.conftest import Paradraft
from tests.e2e.conftest import paradraft as paradraft
from tests.real.conftest import CODER_05B, CODER_15B, FOLDERS, SAMPLINGS, SMOLLM2, Loaded, check_is_fast, real

pytestmark = pytest.mark.real


def reason(name: str) -> str:
    return str(automatic(real(name), Speculation(drafter="auto")).reason)


def test_it_is_named_for_its_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the digest of the target: if it were wrong, the draft would never be named."""
    monkeypatch.setattr("paradraft.engine.automatic.drafter_for", lambda target: None)  # one that was made is taken
    assert "is shipped: paradraft merge qwen2.5-coder-1.5b" in reason(CODER_15B)
    for name in (SMOLLM2, CODER_05B, *FOLDERS):
        assert "is shipped" not in reason(name)


def test_it_drafts_for_its_target(paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the shipped files, and the dtype of a draft folder beside a file: untrained, the mask yields less than 2
    tokens per target pass."""
    merged = tmp_path / "draft"
    assert paradraft("merge", "qwen2.5-coder-1.5b", "--base", real(CODER_05B), "--out", merged).code == 0
    target = Loaded(name=CODER_15B, engine=load(real(CODER_15B), drafter="none"))
    engine = load(real(CODER_15B), drafter="pard", draft=str(merged), k=4, lengths="fixed")
    check_is_fast(engine)
    (draft,) = engine.drafter.models
    assert isinstance(weight := draft.model.lm_head.weight, QuantizedTensor) and weight.bits == 8
    for sampling in SAMPLINGS:
        stats = target.check(engine, sampling, batch_size=1)
        assert sum(one.tokens for one in stats) > 2.2 * sum(one.rounds for one in stats)

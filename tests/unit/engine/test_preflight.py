"""What is known to be wrong before weights are read, and what fits by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paradraft.engine import preflight
from paradraft.engine.loader import HERE, load_engine
from paradraft.engine.preflight import fitted
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sources import loading, target_loading

RUNTIME = Runtime(device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def _nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(target_loading, "load_model", read)


def changed(model: Path, folder: Path, **settings: object) -> str:
    """A copy of a model with other settings in its config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return str(folder)


def speculation(draft: Path | str, drafter: str = "autoregressive") -> Speculation:
    return Speculation(drafter=drafter, draft=str(draft), k=4)


def test_a_smaller_draft_decides_how_long_texts_may_be(family: Path, tmp_path: Path) -> None:
    """Guards the default: a target with room for 128,000 tokens and a draft with room for fewer just work."""
    target, draft = str(family / "target"), changed(family / "target", tmp_path / "draft", max_position_embeddings=77)
    limit = loading.load_config(target).max_position_embeddings
    assert fitted(RUNTIME, target, speculation(draft), HERE).capacity == 77
    assert fitted(RUNTIME, target, speculation(target), HERE).capacity is None
    asked = Runtime(device="cpu", dtype="float32", capacity=60)
    assert fitted(asked, target, speculation(draft), HERE) == asked
    more = Runtime(device="cpu", dtype="float32", capacity=limit)
    with pytest.raises(ValueError, match=r"has room for 77 tokens, the target for \d+: set capacity=77"):
        fitted(more, target, speculation(draft), HERE)


@pytest.mark.parametrize(
    ("settings", "runtime", "complaint"),
    [
        ({}, {"capacity": 10**9}, r"capacity=1000000000: this model has room for 1 to \d+ tokens"),
        ({"vocab_size": 5}, {}, "knows 5 tokens, the target"),
        ({"model_type": "gpt2"}, {}, "gpt2"),
    ],
)
def test_what_does_not_fit_is_said_first(
    family: Path, tmp_path: Path, settings: dict[str, object], runtime: dict[str, Any], complaint: str
) -> None:
    """Guards users of large models against minutes of loading before the message."""
    draft = changed(family / "target", tmp_path / "draft", **settings)
    runs = Runtime(device="cpu", dtype="float32", **runtime)
    with pytest.raises(ValueError, match=complaint):
        load_engine(str(family / "target"), speculation(draft), runtime=runs)


def test_a_checkpoint_of_another_target_is_refused_by_its_config(family: Path, tmp_path: Path) -> None:
    """Guards against reading a target for a drafter that cannot be used beside it."""
    identity = {"hidden_size": 7, "num_hidden_layers": 1, "vocab_size": 9, "weights": None}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "target": identity}))
    target = str(family / "target")
    with pytest.raises(ValueError, match="was trained for another target, with hidden_size=7"):
        load_engine(target, speculation(tmp_path, "eagle"))
    for drafter in ("medusa", "pard"):
        with pytest.raises(ValueError, match=f"has the model_type 'eagle': drafter '{drafter}' needs one of its own"):
            load_engine(target, speculation(tmp_path, drafter))


def test_weights_that_do_not_fit_into_memory(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a machine against the system's way of ending what is too large; both models are counted."""
    target = str(family / "target")
    weights = sum(weight.numel() for weight in loading.load_skeleton(target).parameters())
    for free, dtype, fits in ((7.9, "float32", False), (8.1, "float32", True), (4.1, "bfloat16", True)):
        monkeypatch.setattr(preflight, "free_bytes", lambda device, free=free: free * weights)
        runtime = Runtime(device="cpu", dtype=dtype)
        if fits:
            fitted(runtime, target, speculation(target), HERE)
            continue
        with pytest.raises(ValueError, match=r"weights, .* in float32.*, do not fit into the .* free on cpu"):
            fitted(runtime, target, speculation(target), HERE)


def test_shapes_fit_too() -> None:
    """Guards benchmarks of models that nobody has."""
    shapes = Speculation(drafter="pard", draft="shape:tiny-draft", k=4)
    assert fitted(RUNTIME, "shape:tiny-target", shapes, HERE) == RUNTIME
    with pytest.raises(ValueError, match=r"knows 100 tokens, the target \d{4}: use"):
        fitted(RUNTIME, "shape:pocket-target", shapes, HERE)

"""What a load plan settles, and what is known to be wrong before weights are read."""

from __future__ import annotations

import json
import shutil
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from paradraft.engine import loader
from paradraft.engine.loader import check_memory, load_engine, resolve
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import AUTO, Runtime
from paradraft.sources import load_plan, loading, target_loading
from paradraft.sources.load_plan import Checkpoint, LoadPlan
from paradraft.tree import Tree

RUNTIME = Runtime(device="cpu", dtype="float32")


@pytest.fixture
def _weights_are_read() -> None:
    """For tests that load."""


@pytest.fixture(autouse=True)
def _nothing_is_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "_weights_are_read" in request.fixturenames:
        return

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


def planned(runtime: Runtime, target: str, speculation: Speculation) -> LoadPlan:
    return resolve(Checkpoint.find(target), [speculation], runtime)


def test_a_smaller_draft_decides_how_long_texts_may_be(family: Path, tmp_path: Path) -> None:
    """Guards the default: a target with room for 128,000 tokens and a draft with room for fewer just work."""
    target, draft = str(family / "target"), changed(family / "target", tmp_path / "draft", max_position_embeddings=77)
    limit = loading.load_config(target).max_position_embeddings
    assert planned(RUNTIME, target, speculation(draft)).runtime.capacity == 77
    assert planned(RUNTIME, target, speculation(target)).runtime.capacity is None
    asked = Runtime(device="cpu", dtype="float32", capacity=60)
    assert planned(asked, target, speculation(draft)).runtime == asked
    more = Runtime(device="cpu", dtype="float32", capacity=limit)
    with pytest.raises(ValueError, match=r"has room for 77 tokens, the target for \d+: set capacity=77"):
        planned(more, target, speculation(draft))


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
        monkeypatch.setattr(loader, "free_bytes", lambda device, free=free: free * weights)
        runtime = Runtime(device="cpu", dtype=dtype)
        if fits:
            check_memory(planned(runtime, target, speculation(target)))
            continue
        with pytest.raises(ValueError, match=r"weights, .* in float32.*, do not fit into the .* free on cpu"):
            check_memory(planned(runtime, target, speculation(target)))


def test_shapes_fit_too() -> None:
    """Guards benchmarks of shapes, which have random weights."""
    shapes = Speculation(drafter="pard", draft="shape:tiny-draft", k=4)
    assert planned(RUNTIME, "shape:tiny-target", shapes).runtime == RUNTIME
    with pytest.raises(ValueError, match=r"knows 100 tokens, the target \d{4}: use"):
        planned(RUNTIME, "shape:pocket-target", shapes)


@pytest.mark.parametrize(
    ("k", "tree", "width", "settled"),
    [
        (8, None, 64, 64),
        (40, None, 64, 82),  # two drafts of PEARL
        (8, 100, 64, 101),
        (8, None, 200, 200),
        (8, None, 24, 24),  # narrower than usual, and wide enough
        (8, 30, 24, 64),
    ],
)
def test_passes_are_as_wide_as_drafts_need(k: int, tree: int | None, width: int, settled: int) -> None:
    """Guards long drafts, whose pass would be too narrow, and the width that a user has chosen."""
    shape = None if tree is None else Tree(budget=tree)
    drafts = Speculation(drafter="pard", draft="shape:tiny-draft", k=k, tree=shape)
    runtime = Runtime(device="cpu", dtype="float32", width=width)
    assert planned(runtime, "shape:tiny-target", drafts).runtime.width == settled
    both = resolve(Checkpoint.find("shape:tiny-target"), [Speculation(k=3), drafts], runtime)
    assert both.runtime.width == settled


def test_a_plan_leaves_nothing_open(family: Path) -> None:
    """Guards loading, which reads the plan: what is left "auto" would be settled again, and perhaps otherwise."""
    plan = planned(Runtime(draft_dtype="auto"), str(family / "target"), speculation(family / "target"))
    for each in (plan, *plan.drafts):
        assert AUTO not in (each.runtime.device, each.runtime.dtype)
    assert len(plan.drafts) == 1 and plan.ranks == 1
    with pytest.raises(FrozenInstanceError):
        plan.ranks = 2  # type: ignore[misc]


@pytest.mark.usefixtures("_weights_are_read")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_target_is_located_and_its_config_read_once(
    family: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Guards models of a hub, each of whose configs is a request: loading one asked thirteen times."""
    asked: list[tuple[str, str]] = []
    locate, load_config = loading.locate, loading.load_config

    def located(name: str, role: str) -> str:
        asked.append(("located", name))
        return locate(name, role)

    def read(name: str) -> PretrainedConfig:
        asked.append(("read", name))
        return load_config(name)

    for module, name, instead in ((load_plan, "locate", located), (loader, "locate", located)):
        monkeypatch.setattr(module, name, instead)
    monkeypatch.setattr(loading, "load_config", read)
    target, draft = str(family / "target"), str(family / "pard")
    load_engine(target, speculation(draft, "pard"), runtime=Runtime(device="cpu", dtype=dtype))
    assert asked.count(("located", target)) == asked.count(("read", target)) == 1
    assert ("read", draft) in asked


def test_what_plans_share_is_the_widest_pass_and_the_least_capacity(family: Path) -> None:
    """Guards comparisons of methods: with passes of one width, and room for the same texts."""
    checkpoint = Checkpoint.find(str(family / "target"))
    plans = [
        LoadPlan(checkpoint=checkpoint, runtime=Runtime(device="cpu", dtype="float32", width=width, capacity=capacity))
        for width, capacity in ((64, None), (40, 50), (48, 60))
    ]
    assert load_plan.shared(RUNTIME, plans) == Runtime(device="cpu", dtype="float32", width=64, capacity=50)
    assert load_plan.shared(RUNTIME, plans[:1]).capacity is None

"""Checkpoints of drafters that belong to one target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from paradraft.digests import weights_digest
from paradraft.formats.head import CONFIG, WEIGHTS, Head, TargetIdentity, read_head, write_head

TARGET = TargetIdentity(hidden_size=8, num_hidden_layers=2, vocab_size=30, weights="abc")
CONFIG_OF_TARGET = Qwen3Config(hidden_size=8, num_hidden_layers=2, vocab_size=30)
HEAD = Head(config={"model_type": "medusa", "num_heads": 2}, target=TARGET, weights={"b": torch.ones(2, 3)})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Guards the way from training to decoding."""
    write_head(tmp_path, HEAD)
    found = read_head(str(tmp_path), "medusa", CONFIG_OF_TARGET)
    assert (found.config, found.target) == (HEAD.config, HEAD.target)
    assert torch.equal(found.weights["b"], HEAD.weights["b"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"hidden_size": 16}, "hidden_size=8, and this one has 16"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2, and this one has 3"),
        ({"vocab_size": 31}, "vocab_size=30, and this one has 31"),
    ],
)
def test_another_target_is_refused(changed: dict[str, object], told: str) -> None:
    """Guards drafts that are never accepted, without a word."""
    TARGET.check(TARGET, "heads")
    with pytest.raises(ValueError, match=f"draft 'heads' was trained for another target, with {told}: train one"):
        TARGET.check(TargetIdentity(**{**vars(TARGET), **changed}), "heads")


def test_other_weights_are_a_warning() -> None:
    """Guards a fine-tuned target against being refused the drafter of its base, and drafts that are accepted less
    without a word."""
    others = TargetIdentity(**{**vars(TARGET), "weights": "def"})
    with pytest.warns(UserWarning, match="draft 'heads' was trained for other weights than this target's"):
        TARGET.check(others, "heads")
    assert TARGET.differing(others) == ["weights"] and TARGET.differing(TARGET) == []


def test_random_weights_have_no_identity() -> None:
    """Guards shapes with random weights, which have no files: their sizes alone are compared."""
    TARGET.check(TargetIdentity(**{**vars(TARGET), "weights": None}), "heads")


def test_what_a_drafter_needs_is_there(tmp_path: Path) -> None:
    """Guards C++, which would read beyond a matrix of another shape, and tracebacks of keys that are missing."""
    write_head(tmp_path, HEAD)
    head = read_head(str(tmp_path), "medusa", CONFIG_OF_TARGET)
    assert head.setting("num_heads", int) == 2 and head.tensor("b", 2, 3).shape == (2, 3)
    for call, told in [
        (lambda: head.tensor("b", 3, 2), r"b has the shape \(2, 3\), not \(3, 2\)"),
        (lambda: head.tensor("c", 1), "c is missing"),
        (lambda: head.setting("num_heads", float), "num_heads in its config.json is 2"),
        (lambda: head.setting("model_type", str, "hydra"), "model_type in its config.json is 'medusa'"),
        (lambda: head.setting("layers", int), "layers in its config.json is None"),
    ]:
        with pytest.raises(ValueError, match=told):
            call()


@pytest.mark.parametrize(
    "damage", ["other kind", "no target", "a list", "no text", "no json", "no weights", "half of the weights"]
)
def test_damage_is_one_line(tmp_path: Path, damage: str) -> None:
    """Guards tracebacks of half-copied folders."""
    write_head(tmp_path, HEAD)
    config = json.loads((tmp_path / CONFIG).read_text())
    match damage:
        case "other kind":
            config["model_type"] = "eagle"
        case "no target":
            del config["target"]
        case "no weights":
            (tmp_path / WEIGHTS).unlink()
        case "half of the weights":
            (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-4])
    texts = {"no json": b"{", "a list": b"[]", "no text": b"\xff\xfe{"}
    (tmp_path / CONFIG).write_bytes(texts.get(damage, json.dumps(config).encode()))
    with pytest.raises(ValueError, match=r"^draft ") as told:
        read_head(str(tmp_path), "medusa", CONFIG_OF_TARGET)
    assert "\n" not in str(told.value) and "medusa" in str(told.value)


def test_a_digest_is_of_the_tensors(tmp_path: Path) -> None:
    """Guards targets that are cut into other files, which are the same, and fine-tunes, which are not: one changed
    number in the middle of a large tensor is seen."""
    tensors = {"a": torch.arange(6.0), "b": torch.zeros(3000)}
    for name in ("whole", "cut", "tuned", "renamed", "nothing"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "cut" / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "cut" / "model-00002-of-00002.safetensors")
    tuned = load_file(tmp_path / "whole" / "model.safetensors")
    tuned["b"][1501] = 1e-3
    save_file(tuned, tmp_path / "tuned" / "model.safetensors")
    save_file({"a": tensors["a"], "c": tensors["b"]}, tmp_path / "renamed" / "model.safetensors")
    digests = {name: weights_digest(str(tmp_path / name)) for name in ("whole", "cut", "tuned", "renamed", "nothing")}
    assert digests["whole"] == digests["cut"] and digests["nothing"] is None
    assert len(set(digests.values())) == 4

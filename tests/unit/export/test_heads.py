"""Drafters on the target's states as vLLM reads them, and those that it has not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from paradraft.drafters import serving_of
from paradraft.engine.speculation import Speculation
from paradraft.export.heads import check_head, is_exported, needs_output_head, write_for_vllm
from paradraft.export.vllm import speculative_config
from paradraft.formats.head import Head, TargetIdentity, read_checkpoint
from paradraft.sources.loading import load_config
from paradraft.train import recipe_class, trainee_module, trainee_names
from paradraft.train.drafters.heads import HeadRecipe
from paradraft.train.run import launch
from tests.contract.test_every_trainee import recipe_for
from tests.support.drafts import draft_of


def trained(family: Path, out: Path, name: str, **settings: Any) -> Head:
    recipe = recipe_for(name, family, out, steps=2, k=3, **settings)
    launch.train(recipe, trainee_module(name).build, lambda report: None)
    return read_checkpoint(str(out))


def written(family: Path, out: Path, head: Head) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the weights of an exported folder."""
    target = AutoModelForCausalLM.from_pretrained(family / "target")
    out.mkdir()
    output_head = target.lm_head.weight.detach() if needs_output_head(head) else None
    write_for_vllm(out, head, load_config(str(family / "target")), output_head)
    with safe_open(out / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    return json.loads((out / "config.json").read_text()), weights


@pytest.mark.parametrize("own_heads", [False, True])
def test_medusa_has_the_names_that_vllm_reads(family: Path, tmp_path: Path, own_heads: bool) -> None:
    """Guards the heads of `MedusaModel`: what is not found keeps the numbers that vLLM happens to begin with, and no
    error tells. Heads that share an output head need it in their folder."""
    head = trained(family, tmp_path / "head", "medusa", own_heads=own_heads, layers=2)
    assert needs_output_head(head) is not own_heads and is_exported(head) is own_heads
    config, weights = written(family, tmp_path / "out", head)
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (3, 2, True)
    assert (config["hidden_size"], config["vocab_size"], config["original_lm_head"]) == (32, 72, not own_heads)
    blocks = {
        f"blocks.{n}.layers.{layer}.{kind}" for n in range(3) for layer in range(2) for kind in ("weight", "bias")
    }
    assert weights.keys() == blocks | ({f"lm_heads.{n}.weight" for n in range(3)} if own_heads else {"lm_head.weight"})
    assert is_exported(read_checkpoint(str(tmp_path / "out")))
    if not own_heads:
        target = AutoModelForCausalLM.from_pretrained(family / "target")
        assert torch.equal(weights["lm_head.weight"], target.lm_head.weight)


def test_eagle_has_the_names_that_vllm_reads(family: Path, tmp_path: Path) -> None:
    """Guards the layers of `EagleMistralForCausalLM`, and that the folder is ours as well: it is measured here."""
    head = trained(family, tmp_path / "head", "eagle", for_vllm=True)
    assert not is_exported(head)
    config, weights = written(family, tmp_path / "out", head)
    layers = config["model"]
    assert config["model_type"] == "eagle" and layers["model_type"] == "mistral"
    assert layers["architectures"] == ["EagleMistralForCausalLM"] and layers["num_hidden_layers"] == 1
    assert layers["sliding_window"] is None and "layer_types" not in layers, "vLLM would count layers from the target's"
    assert (layers["head_dim"], layers["vocab_size"], layers["rope_parameters"]["rope_theta"]) == (8, 72, 10000.0)
    assert weights.keys() >= {"model.fc.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"}
    assert all(name.startswith("model.") and not name.endswith("bias") for name in weights)
    again = read_checkpoint(str(tmp_path / "out"))
    assert is_exported(again) and again.weights.keys() == head.weights.keys()
    assert all(torch.equal(again.weights[name], weight) for name, weight in head.weights.items())


def test_the_others_are_refused_with_a_reason() -> None:
    """Guards whoever serves: vLLM loads what has the right names and shapes, and accepts what it can. A new drafter on
    the target's states must be decided on."""
    of_states = {name for name in trainee_names() if issubclass(recipe_class(trainee_module(name)), HeadRecipe)}
    reasons = {name: serving_of(name).refusal for name in of_states}
    assert {name for name, why in reasons.items() if why is None} == {"medusa", "dflash"}
    identity = TargetIdentity(hidden_size=8, num_hidden_layers=1, vocab_size=9, weights=None)
    head = Head(config={"model_type": "mine"}, target=identity, weights={}, name="here")
    for name, why in reasons.items():
        if why is None:
            continue
        with pytest.raises(ValueError, match=f"is of the kind {name}, and vLLM") as told:
            check_head(replace(head, config={"model_type": name}), 3)
        assert why in str(told.value)
    with pytest.raises(ValueError, match="vLLM has no drafter 'mine'"):
        check_head(head, 3)


@pytest.mark.parametrize("settings", [{"draft_vocab_size": 9}, {"head_rank": 4}])
def test_a_smaller_output_head_is_refused(family: Path, tmp_path: Path, settings: dict[str, int]) -> None:
    """Guards against vLLM drafting with the target's head what was trained with another."""
    head = trained(family, tmp_path / "head", "medusa", **settings)
    with pytest.raises(ValueError, match="has an output head that vLLM does not read: train it without"):
        check_head(head, 3)


def test_a_server_takes_only_what_was_exported(family: Path, tmp_path: Path) -> None:
    """Guards against heads that vLLM fills with anything: more than were trained, or an output head that is not there;
    and against those of another target."""
    target = str(family / "target")
    for name, settings in (("medusa", {}), ("eagle", {"for_vllm": True})):
        head = trained(family, tmp_path / name, name, **settings)
        written(family, tmp_path / f"{name}-out", head)

        def config(draft: Path, k: int = 3, drafter: str = name, of: str = target) -> dict[str, Any] | None:
            return speculative_config(Speculation(drafter=drafter, draft=str(draft), k=k, lengths="fixed"), of)

        out = tmp_path / f"{name}-out"
        assert config(out) == {"method": name, "model": str(out), "num_speculative_tokens": 3}
        with pytest.raises(ValueError, match=r"lacks what vLLM looks for in it: run `paradraft export .* --to vllm`"):
            config(tmp_path / name)
        with pytest.warns(UserWarning, match="was trained for other weights"):
            config(out, of=str(family / "draft"))
    with pytest.raises(ValueError, match=r"k=4: .*medusa-out' has 3 heads"):
        speculative_config(
            Speculation(drafter="medusa", draft=str(tmp_path / "medusa-out"), k=4, lengths="fixed"), target
        )
    with pytest.raises(ValueError, match="vLLM drafts one K with medusa at every batch size"):
        speculative_config(
            Speculation(drafter="medusa", draft=str(tmp_path / "medusa-out"), lengths="fixed"), target, {1: 3}
        )
    with pytest.raises(ValueError, match="train it with for_vllm=true"):
        speculative_config(Speculation(drafter="eagle", draft=draft_of(family, "eagle"), k=3, lengths="fixed"), target)

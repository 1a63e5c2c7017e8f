from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paradraft.data.samples import Sample
from paradraft.sources.loading import load_tokenizer
from paradraft.train import memory
from paradraft.train.drafters.pard import drafter_skeleton
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.objectives.batch import Drop, collate
from paradraft.train.objectives.objective import Objective
from paradraft.train.run import setup
from paradraft.train.trainee import RunData
from tests.support import gguf_files
from tests.support.training import prepare_pard
from tests.unit.train.run.test_trainer import recipe_for

N, VOCAB, SAMPLES = 200, 500, 2


def model_of(kind: str = "qwen3", **sizes: Any) -> PreTrainedModel:
    config = {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    found = AutoConfig.for_model(kind, vocab_size=VOCAB, tie_word_embeddings=True, **config | sizes)
    return AutoModelForCausalLM.from_config(found)


FULL = {"kind": "gemma3_text", "layer_types": ["full_attention"] * 4}
EXPERTS = {"kind": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    "sizes",
    [
        {}, {"hidden_size": 128, "intermediate_size": 512}, {"num_hidden_layers": 12}, {"intermediate_size": 32},
        {"kind": "granite"}, FULL, FULL | {"hidden_size": 128, "intermediate_size": 32},
        EXPERTS, EXPERTS | {"num_experts_per_tok": 8, "moe_intermediate_size": 16, "hidden_size": 128},
        EXPERTS | {"num_experts_per_tok": 2, "moe_intermediate_size": 160},
    ],
)  # fmt: skip
def test_what_a_pass_keeps_is_what_was_estimated(sizes: dict[str, Any]) -> None:
    """Guards the estimate against the memory that autograd really holds on to: never less, and not twice as much. The
    mask and the logits, which are counted apart, are left out."""
    model = model_of(**sizes)
    recipe = PardRecipe(model="m", data=["d"], out="o", steps=1)
    sample = Sample(tokens=[1] * (N + 1), is_label=[True] * (N + 1))
    drop = Drop(k=recipe.k, r=recipe.r, r_min=recipe.r_min, mask_id=VOCAB - 1)
    batch = collate([[sample]] * SAMPLES, drop, [[torch.Generator()] for _ in range(SAMPLES)])
    R = batch.tokens.shape[1]
    assert 0 <= memory.rows_of(N + 1, k=recipe.k, r=recipe.r, r_min=recipe.r_min) - R <= recipe.k
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        of_the_mask = tensor.shape[-2:] == (R, R)
        of_the_logits = tensor.shape[-1:] == (VOCAB,)
        if not of_the_mask and not of_the_logits and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, *_ = Objective(model)(batch, torch.ones(recipe.k))
    estimated = memory.estimate(recipe, model, weights=0, rows=R, passes=SAMPLES, bf16=False)
    assert loss.isfinite()
    assert sum(kept.values()) <= estimated.rows <= 2 * sum(kept.values())


def test_settings_that_save_memory_lower_the_estimate() -> None:
    """Guards the advice in the complaint: what it tells to change must help."""
    base = {"model": "m", "data": ["d"], "out": "o", "steps": 1}
    sizes = {"weights": 0, "rows": 1000, "bf16": False}

    def total(passes: int, **settings: object) -> float:
        return memory.estimate(PardRecipe(**base, **settings), model_of(), passes=passes, **sizes).total

    assert total(1) < total(4)
    assert total(4, gradient_checkpointing=True) < total(4)
    frozen = model_of()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    assert memory.estimate(PardRecipe(**base), frozen, passes=4, **sizes).total < total(4)


def bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}, "optimizer": "adamw"}, {"k": 1}])
def test_weights_are_counted_as_they_will_be_loaded(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    """Guards the refusal that comes before loading: models of other dtypes, one that is forgotten, or adapters whose
    base is taken for trained."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "computes_bf16", lambda device: True)
    monkeypatch.setattr(setup, "computes_bf16", lambda device: True)
    target, draft = str(family / "target"), str(family / "draft")
    recipe = recipe_for(family, tmp_path, teacher=target, bf16=True, held_out=2, **settings)
    skeleton = drafter_skeleton(recipe, load_tokenizer(draft), "cpu").model
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    prepared = prepare_pard(recipe)
    model, teacher = prepared.trainee.objective.model, prepared.trainee.objective.teacher
    meter = prepared.acceptance(prepared.loader(cpu))
    assert teacher is not None and meter is not None
    measured = sum(parameter.numel() * 2 for parameter in model.parameters())
    loaded = sum(map(bytes_of, (model, teacher.model, meter.target.lm.model))) + measured
    sizes = {"rows": 1, "passes": 1, "bf16": True, "is_taught": True}
    data = RunData(
        tokenizer=load_tokenizer(draft), samples=[], longest=1, largest=1, device=cpu, bf16=True, samples_per_pass=1,
        measures=True,
    )  # fmt: skip
    frozen = memory.frozen_bytes(target, bf16=True)
    weights = memory.weight_bytes(recipe, memory.parameters_of(skeleton), data, frozen=frozen)
    found = memory.estimate(recipe, skeleton, weights=weights, **sizes)
    assert found.models == loaded
    assert found == memory.estimate(recipe, model, weights=loaded, **sizes)
    unmeasured = memory.weight_bytes(
        recipe, memory.parameters_of(skeleton), replace(data, measures=False), frozen=frozen
    )
    assert unmeasured == bytes_of(model) + bytes_of(teacher.model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_few_bits_are_counted_as_they_are_loaded(tmp_path: Path, kind: str) -> None:
    """Guards a large file that teaches on a small machine, and `ppd`, which needs it as numbers."""
    model, file = gguf_files.tiny_model("llama", width=256), str(tmp_path / "target.gguf")
    gguf_files.write_gguf(tmp_path / "target.gguf", model, kind)
    numbers = memory.frozen_bytes(file, bf16=False, as_numbers=True)
    assert numbers == 4 * memory.parameters_of(model)
    assert memory.frozen_bytes(file, bf16=False) < (0.5 if kind == "Q8_0" else 0.4) * numbers


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim")
def test_what_is_freed_between_blocks_in_use_is_given_back() -> None:
    """Guards the memory of the steps after an evaluation, which glibc would keep: with a control."""
    size, held = 100_000, psutil.Process().memory_info
    blocks = [torch.ones(size // 4) for _ in range(2000)]
    full = held().rss
    kept = blocks[::20]
    del blocks
    before = held().rss
    memory.give_back()
    most = 1000 * size  # of 1,900 blocks
    assert before > full - most, "glibc alone keeps them, else this test shows nothing"
    assert held().rss < full - most
    assert len(kept) == 100

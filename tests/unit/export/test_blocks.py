"""Block drafters as engines read them: folders of DSpark's for vLLM, files for llama.cpp."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.export.block_engines import check_block, check_unscaled
from paradraft.export.gguf import write_gguf
from paradraft.export.handoff import hand_off
from paradraft.export.vllm import NeedsExportError, check_name, speculative_config
from paradraft.formats.block import BlockSettings
from paradraft.formats.folder import save_model
from paradraft.formats.head import read_checkpoint
from paradraft.formats.published_block import published_k, read_block
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config, load_model, load_tokenizer, locate
from tests.conftest import tiny_tokenizer
from tests.contract.test_every_trainee import recipe_for, train
from tests.support.drafts import train_head
from tests.support.kinds import model_of
from tests.unit.export.test_gguf import read

EXACT = Runtime(dtype="float64", compiled=False)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "markov": {"markov_rank": 6, "draft_vocab_size": 20},
    "low rank": {"markov_rank": 4, "head_rank": 6},
    "as DFlash": {"causal": False, "anchor_first": False, "draft_vocab_size": 24},
    "as DSpark": {"causal": False, "markov_rank": 5},
    "as DFlash 2": {"causal": False, "anchor_first": False, "selector_rank": 5},
    "causal DFlash 2": {"anchor_first": False, "selector_rank": 5},
}
MASKS, SOME = {"anchor_first": False}, {"draft_vocab_size": 20}
PROMPTS = ([5], [7, 9, 11, 13, 2], list(range(1, 14)), [8, 3] * 20)


def trained(family: Path, out: Path, kind: str, **settings: Any) -> Path:
    train_head(family, "dflash", out, **{"k": 4, "target_layers": [1], "steps": 12} | KINDS[kind] | settings)
    return out


def exported(family: Path, draft: Path, out: Path, engine: str, *, k: int = 4, dtype: str | None = None) -> Path:
    runtime = Runtime(dtype="float32", draft_dtype=dtype)
    target = "pocket" if engine == "gguf" else str(family / "target")
    hand_off(str(draft), target, engine, out, k=k, prompts=[], max_new_tokens=8, runtime=runtime)
    return out


def drafts(family: Path, draft: Path) -> list[list[int]]:
    """What a folder drafts in the first rounds of some texts."""
    engine = load(str(family / "target"), drafter="dflash", draft=str(draft), k=4, runtime=EXACT, lengths="fixed")
    found = []
    for prompt in PROMPTS:
        batch = engine.new_batch()
        batch.join([Generation(Request(tokens=prompt, max_new_tokens=40))])
        for _ in range(4):
            found.append(batch.drafter.propose([4]).tokens[0].tolist())
            batch.step()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_for_vllm_drafts_the_same(family: Path, tmp_path: Path, kind: str) -> None:
    """Guards names and settings in an exported folder: what an engine does not find, it leaves at its own numbers."""
    draft = trained(family, tmp_path / "head", kind)
    out = exported(family, draft, tmp_path / "out", "vllm")
    config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    head, target = read_checkpoint(str(draft)), load_config(str(family / "target"))
    settings = KINDS[kind]
    is_first, ids = settings.get("anchor_first", True), settings.get("draft_vocab_size", target.vocab_size)
    has_selector = "selector_rank" in settings
    assert config["architectures"] == ["DFlash2DraftModel" if has_selector else "Qwen3DSparkModel"]
    assert config["model_type"] == "qwen3"
    assert config["is_causal"] is config["dflash_config"]["causal"] is settings.get("causal", True)
    assert config["block_size"] == (4 if is_first else 5)
    assert config["dflash_config"]["target_layer_ids"] == [0], "of outputs, from 0 on"
    assert config["dflash_config"]["mask_token_id"] == head.config["mask_token_id"]
    assert config["vocab_size"] == target.vocab_size and config.get("draft_vocab_size", target.vocab_size) == ids
    assert config["attention_bias"] is False
    if has_selector:
        own = {"selector_rank": 5, "selector_top_k": 16, "conv_kernel_size": 2, "conv_group_size": 16}
        assert config["dflash_config"].items() >= own.items()
        assert weights["candidate_selector.predecessor_codebook"].shape == (target.vocab_size, 5)
        assert weights["layers.0.mlp_conv.base_kernel"].shape == (2, 2, target.hidden_size)
        assert weights["layers.0.attention_conv.kernel_projection.weight"].shape == (4 * 2, target.hidden_size)
    else:
        assert config["sample_from_anchor"] is is_first and not config["enable_confidence_head"]
        assert all(config[key] == config["dflash_config"][key] for key in ("target_layer_ids", "mask_token_id"))
        rank = config["markov_rank"]
        assert rank == settings.get("markov_rank", 8)
        assert weights["markov_head.markov_w1.weight"].shape == (target.vocab_size, rank)
        assert weights["markov_head.markov_w2.weight"].shape == (ids, rank)
    has_head = "draft_vocab_size" in settings or "head_rank" in settings
    assert ("lm_head.weight" in weights) is has_head and ("d2t" in weights) is (ids != target.vocab_size)
    assert "embed_tokens.weight" not in weights and not any(name.startswith("low_rank") for name in weights)
    assert published_k(load_config(str(out))) == (4 if settings.get("causal") is False else None)
    if kind != "low rank":  # whose product is rounded once more
        assert drafts(family, out) == drafts(family, draft)
    weights["fc.weight"] = weights["fc.weight"].roll(1, 0)
    save_file(weights, out / "model.safetensors")
    assert drafts(family, out) != drafts(family, draft), "the drafts depend on what was written"


FOR_OTHERS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("sglang", "DSPARK"): ("Qwen3DSparkModel", {"markov_rank": 5}),
    ("sglang", "DSPARK --speculative-draft-model-path"): ("Qwen3DSparkModel", {"causal": False}),
    ("sglang", "DFLASH"): ("DFlashDraftModel", {"anchor_first": False}),
    ("sglang", "DFLASH --"): ("DFlash2DraftModel", {"anchor_first": False, "causal": False, "selector_rank": 5}),
    ("tensorrt-llm", "trtllm-serve"): ("DFlashDraftModel", {"anchor_first": False, "causal": False}),
}


@pytest.mark.parametrize("kind", FOR_OTHERS)
def test_folders_for_other_engines_draft_the_same(family: Path, tmp_path: Path, kind: tuple[str, str]) -> None:
    """Guards folders that SGLang would take for other blocks: layer types say whether they are causal."""
    (engine, launched), (architecture, settings) = kind, FOR_OTHERS[kind]
    draft = trained(family, tmp_path / "head", "plain", **settings)
    out = exported(family, draft, tmp_path / "out", engine)
    config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == [architecture] and config["dflash_config"]["target_layer_ids"] == [0]
    assert config["block_size"] == (4 if settings.get("anchor_first", True) else 5)
    is_windowed = engine == "sglang" and settings.get("causal", True)
    assert config["layer_types"] == ["sliding_attention" if is_windowed else "full_attention"] * 2
    assert config.get("sliding_window") == (config["max_position_embeddings"] if is_windowed else None)
    assert any(name.startswith("markov_head") for name in weights) is (architecture == "Qwen3DSparkModel")
    assert {"lm_head.weight", "d2t"}.isdisjoint(weights)
    card = (out / "README.md").read_text()
    assert launched in card and "drafts blocks on GPUs only" in card
    assert ("SGLANG_RAGGED_VERIFY_MODE=static" in card) is (architecture == "Qwen3DSparkModel")
    if engine == "tensorrt-llm":
        speculative = yaml.safe_load((out / "speculative.yaml").read_text())["speculative_config"]
        mask = read_checkpoint(str(draft)).config["mask_token_id"]
        assert speculative == {"decoding_type": "DFlash", "max_draft_len": 4, "speculative_model": str(out),
                               "mask_token_id": mask, "target_layer_ids": [0]}  # fmt: skip
    assert drafts(family, out) == drafts(family, draft)

    def is_causal(entries: dict[str, Any]) -> bool:
        own = {key: entry for key, entry in config["dflash_config"].items() if key != "causal"}
        (out / "config.json").write_text(json.dumps(config | entries | {"is_causal": None, "dflash_config": own}))
        return BlockSettings.of(read_block(str(out), "dflash", load_config(str(family / "target")))).causal

    assert is_causal({}) is is_windowed
    assert not is_causal({"layer_types": ["full_attention"] * 2, "use_sliding_window": False})
    for entries in ({"sliding_window": 9}, {"layer_types": ["sliding_attention", "full_attention"]}):
        with pytest.raises(ValueError, match="layers with a sliding window"):
            is_causal({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4096} | entries)


def test_convolutions_are_refused(family: Path, tmp_path: Path) -> None:
    """Guards folders of DFlash 2 with layers that are not computed here: they would draft, and badly."""
    out = exported(family, trained(family, tmp_path / "head", "as DFlash 2"), tmp_path / "out", "vllm")
    weights = load_file(out / "model.safetensors")
    base, products = "layers.1.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"
    changed = weights[products].clone()
    changed[3, 2] = 0.5
    for other in (
        {products: changed},
        {base: weights[base].roll(1, 1).contiguous()},
        {base: weights[base][0].clone()},
        {base: torch.zeros(())},
        {base: None},
    ):
        damaged = {name: weight for name, weight in (weights | other).items() if weight is not None}
        save_file(damaged, out / "model.safetensors")
        with pytest.raises(ValueError, match="convolutions in its layers"):
            drafts(family, out)
    save_file(weights, out / "model.safetensors")
    assert drafts(family, out)
    config = json.loads((out / "config.json").read_text())
    for entries in ({"num_hidden_layers": 10**12}, {"num_hidden_layers": None}, {"hidden_size": 10**12}):
        (out / "config.json").write_text(json.dumps(config | entries))
        with pytest.raises(ValueError, match=r"train it again|use another|convolutions|is for another"):
            drafts(family, out)


def test_vllm_is_told_what_it_needs(family: Path, tmp_path: Path) -> None:
    """Guards a server that starts with a folder in our format, or drafts more than was trained."""
    target = str(family / "target")
    draft = trained(family, tmp_path / "head", "plain")

    def config(folder: Path, k: int = 4) -> dict[str, Any] | None:
        return speculative_config(Speculation(drafter="dflash", draft=str(folder), k=k), target)

    with pytest.raises(NeedsExportError, match=r"run `paradraft export .* --to vllm -k 4`"):
        config(draft)
    out = exported(family, draft, tmp_path / "for-vllm", "vllm")
    assert config(out) == {"method": "dspark", "model": str(out), "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match=r"k=5: .* was trained to draft 4 tokens"):
        config(out, k=5)
    card = (out / "README.md").read_text()
    assert '"method": "dspark"' in card and "GPUs only" in card
    selecting = trained(family, tmp_path / "selecting", "as DFlash 2")
    assert config(exported(family, selecting, tmp_path / "second", "vllm"))["method"] == "dflash"  # type: ignore[index]
    check_name("dspark", "build/my-dspark")
    check_name("dflash", "build/my-dflash2")
    with pytest.raises(ValueError, match="'dspark' in its name"):
        check_name("dflash", "build/my-dspark")
    with pytest.raises(ValueError, match="'dflash' in its name"):
        check_name("dspark", "build/my-dflash")


@pytest.mark.parametrize("settings", [{"selector_rank": 4}, {"previous_token_rank": 4}])
def test_no_card_advises_an_export_that_is_refused(family: Path, tmp_path: Path, settings: dict[str, int]) -> None:
    """Guards the commands after a training: one with a head that engines do not read has said to export it."""
    card = (trained(family, tmp_path / "head", "plain", **settings) / "README.md").read_text()
    assert "# vLLM cannot serve it: 'DRAFTER' has a" in card and "paradraft export" not in card
    assert "paradraft export" in (trained(family, tmp_path / "plain", "plain") / "README.md").read_text()


def test_a_file_has_all_weights_and_settings(family: Path, tmp_path: Path) -> None:
    """Guards the file for llama.cpp, which leaves out what it does not find of a head, and counts layers from 1."""
    settings = {"draft_vocab_size": 50, "markov_rank": 32, "causal": False, "anchor_first": False}
    recipe = recipe_for("dflash", family, tmp_path / "head", model="pocket", k=3, steps=1, **settings)
    train("dflash", recipe)
    out = exported(family, tmp_path / "head", tmp_path / "out", "gguf", k=3, dtype="float32")
    found, tensors = read(out / "model.gguf")
    head = read_checkpoint(str(tmp_path / "head"))
    assert found["general.architecture"] == "dflash" and found["dflash.block_count"] == 2
    assert found["dflash.target_layers"] == head.config["target_layers"] and found["dflash.block_size"] == 4
    assert found["dflash.sample_from_anchor"] is found["dflash.attention.causal"] is False
    assert found["dflash.has_confidence_head"] is False
    assert found["tokenizer.ggml.mask_token_id"] == head.config["mask_token_id"]
    assert len(found["tokenizer.ggml.tokens"]) == head.target.vocab_size == found["dflash.vocab_size"]
    own = {"layers.1.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight", "norm.weight": "output_norm.weight",
           "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight", "fc.weight": "fc.weight",
           "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
           "hidden_norm.weight": "enc.output_norm.weight", "markov.embedding.weight": "markov_w1.weight",
           "markov.output.weight": "markov_w2.weight"}  # fmt: skip
    for ours, theirs in own.items():
        assert torch.equal(torch.tensor(tensors[theirs]), head.weights[ours].float()), ours
    ids = head.weights["d2t"] + torch.arange(50)
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(out / "model.gguf").tensors}
    assert kinds["d2t"] == "I64" and tensors["d2t"].tolist() == ids.tolist()
    output_head = load("pocket", drafter="none", runtime=Runtime(dtype="float32")).target.lm.model.lm_head.weight
    assert torch.equal(torch.tensor(tensors["output.weight"]), output_head[ids].bfloat16().float())
    assert len(tensors) == 2 * 11 + 7 and "--spec-type draft-dspark" in (out / "README.md").read_text()


def test_a_target_of_few_bits_gives_rows_of_its_head(family: Path, tmp_path: Path) -> None:
    """Guards GGUF targets, whose head is no numbers; and the rows of its ids."""
    folder, file = locate("pocket", "target"), tmp_path / "target.gguf"
    model, tokenizer = load_model(folder, Runtime(device="cpu", dtype="float32")), load_tokenizer(folder)
    write_gguf(file, model, tokenizer, dtype="int8", name="target")
    train("dflash", recipe_for("dflash", family, tmp_path / "head", model=str(file), k=3, steps=1, draft_vocab_size=50))
    runtime = Runtime(dtype="stored", draft_dtype="float32")
    hand_off(
        str(tmp_path / "head"), str(file), "gguf", tmp_path / "out", k=3, prompts=["def"], max_new_tokens=8,
        runtime=runtime,
    )  # fmt: skip
    _, tensors = read(tmp_path / "out" / "model.gguf")
    whole = model.lm_head.weight[tensors["d2t"].astype(int)].detach()
    written = torch.tensor(tensors["output.weight"])
    assert 0 < (written - whole).abs().max() < 0.02 * whole.abs().max()


@pytest.mark.parametrize(
    ("settings", "k", "engine", "message"),
    [
        ({"previous_token_rank": 4}, 4, "vllm", "has a previous-token head, which no engine reads: train it with"),
        ({"target_layers": [-1]}, 4, "vllm", "reads the target's layer -1, and engines give those from 1 to 1"),
        ({"target_layers": [0, 1]}, 4, "vllm", "reads the target's layer 0"),
        ({"target_layers": [2]}, 4, "vllm", "reads the target's layer 2"),
        ({}, 5, "vllm", "k=5: "),
        ({"causal": False}, 3, "vllm", "k=3: blocks of "),
        ({}, 4, "transformers", "--to transformers: block drafters are written for vllm, gguf, sglang, tensorrt-llm"),
        (SOME, 4, "sglang", "drafts some of the target's tokens, and SGLang drafts all: train it without draft_vocab"),
        ({"head_rank": 6}, 4, "sglang", "has a smaller output head, and SGLang takes the target's: train it without"),
        (MASKS | {"markov_rank": 4}, 4, "sglang", "has a Markov head, and SGLang reads one where the anchor drafts"),
        (
            {"causal": False},
            4,
            "tensorrt-llm",
            "has an anchor that drafts, and TensorRT-LLM reads blocks of which mask",
        ),
        (
            MASKS,
            4,
            "tensorrt-llm",
            "has causal blocks, and TensorRT-LLM lets masks see all of theirs: train it with ca",
        ),
        (MASKS | {"causal": False} | SOME, 4, "tensorrt-llm", "drafts some of the target's tokens, and TensorRT-LLM"),
        (
            MASKS | {"causal": False, "markov_rank": 4},
            4,
            "tensorrt-llm",
            "has a Markov head, and TensorRT-LLM reads no",
        ),
        (MASKS | {"selector_rank": 4}, 4, "tensorrt-llm", "has a selector, and TensorRT-LLM reads none: train it with"),
        ({"selector_rank": 4}, 4, "vllm", "has an anchor that drafts, and vLLM reads blocks of which masks draft all"),
        (MASKS | SOME | {"selector_rank": 4}, 4, "vllm", "vLLM drafts all with a selector: train it without draft_voc"),
    ],
)
def test_what_engines_do_not_compute_is_refused(
    family: Path, tmp_path: Path, settings: dict[str, Any], k: int, engine: str, message: str
) -> None:
    """Guards a folder that an engine loads and drafts badly with."""
    draft = trained(family, tmp_path / "head", "plain", steps=1, **settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        exported(family, draft, tmp_path / "out", engine, k=k)
    assert not (tmp_path / "out").exists()


def test_an_exported_folder_is_not_exported_again(family: Path, tmp_path: Path) -> None:
    """Guards users who have a folder for one engine and want it for another: it looks like a small Qwen3."""
    out = exported(family, trained(family, tmp_path / "head", "plain", steps=1), tmp_path / "out", "sglang")
    with pytest.raises(ValueError, match="is written for an engine already: export the folder that was trained"):
        exported(family, out, tmp_path / "again", "vllm")


@pytest.mark.parametrize("kind", ["granite", "gemma3_text"])
def test_targets_that_scale_are_refused(tmp_path: Path, kind: str) -> None:
    """Guards an engine that reads the target's embeddings unscaled."""
    save_model(tmp_path / "target", model_of(kind), tiny_tokenizer())
    with pytest.raises(ValueError, match="scales its embeddings or logits"):
        check_unscaled(str(tmp_path / "target"))


def test_vllm_serves_blocks_by_the_method_of_their_layout(family: Path, tmp_path: Path) -> None:
    """Guards vLLM's method: a block of DFlash's has another layout than DSpark's."""
    draft = trained(family, tmp_path / "head", "plain", steps=1, causal=False, anchor_first=False)
    for engine, method in (("vllm", "dspark"), ("tensorrt-llm", "dflash")):
        out = exported(family, draft, tmp_path / f"for-{engine}", engine)
        config = speculative_config(Speculation(drafter="dflash", draft=str(out), k=4), str(family / "target"))
        assert config == {"method": method, "model": str(out), "num_speculative_tokens": 4}


def test_a_head_of_other_weights_is_handed_over_with_a_warning(family: Path, tmp_path: Path) -> None:
    draft = trained(family, tmp_path / "head", "plain", steps=1)
    head = read_checkpoint(str(draft))
    assert check_block(head, 4, "vllm").k == 4
    with pytest.warns(UserWarning, match="was trained for other weights"):
        hand_off(
            str(draft), str(family / "draft"), "vllm", tmp_path / "out", k=4, prompts=[], max_new_tokens=8,
            runtime=EXACT,
        )  # fmt: skip
    with pytest.raises(ValueError, match="num_hidden_layers in its config"):
        check_block(replace(head, config=head.config | {"num_hidden_layers": 0}), 4, "vllm")

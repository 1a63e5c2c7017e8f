"""Each published family that has a recipe, as small random models with the same kinds of config.

The configs are the published ones, key for key as `transformers` 4 wrote them, but for their sizes and special ids. The
published weights are far too large to be tested here.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.init.templates import templates_of
from paradraft.train.recipe_file import load_recipe
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.training import train_pard

EXACT = Runtime(dtype="float64")
BOS, EOT, RESERVED = VOCAB, VOCAB + 1, VOCAB + 2
TEMPLATE = "{% for m in messages %}<|bos|>{{ m.content }}<|endoftext|>{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is special about a family.

    Args:
        config: the published config, sizes left out.
        lr: of the authors' training code.
        max_length: tokens of a sample, of the same.
        pard_token: the mask token's id in the published drafter, in the numbers of the small tokenizer.
        rows: of the embedding of draft and target.
        adds_bos: whether the tokenizer puts its first token in front of every text.
        tensors: names of weights that only such a model has, or has not.
        ends: what the generation config calls the end of a text.
    """

    config: dict[str, Any]
    lr: float
    pard_token: int
    rows: tuple[int, int]
    adds_bos: bool = False
    max_length: int = 512
    tensors: dict[str, bool] = field(default_factory=dict)
    ends: int | list[int] = 0


LLAMA3_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}  # fmt: skip
FAMILIES = {
    "llama-3.2": Family(
        lr=1e-5,
        config={
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False,
            "eos_token_id": [0, EOT, RESERVED + 3], "head_dim": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": True,
        },
        pard_token=RESERVED + 1, rows=(RESERVED + 4, RESERVED + 4), adds_bos=True, ends=[0, EOT, RESERVED + 3],
        tensors={"lm_head.weight": False},
    ),
    "qwen2.5": Family(
        lr=3e-5,
        config={
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 21,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
            "tie_word_embeddings": True, "eos_token_id": EOT,
        },
        pard_token=RESERVED, rows=(RESERVED + 6, RESERVED + 14), ends=[EOT, 0],
        tensors={"lm_head.weight": False, "model.layers.0.self_attn.q_proj.bias": True},
    ),
    "qwen3": Family(
        lr=3e-5,
        config={
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 16,
            "max_window_layers": 28, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True, "eos_token_id": EOT,
        },
        pard_token=RESERVED, rows=(RESERVED + 6, RESERVED + 6), ends=[EOT, 0],
        tensors={"model.layers.1.self_attn.q_norm.weight": True, "model.layers.1.self_attn.k_norm.weight": True},
    ),
    "deepseek-r1-distill-qwen": Family(
        lr=8e-5, max_length=1024,
        config={
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 21,
            "rms_norm_eps": 1e-06, "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False,
            "use_sliding_window": False, "tie_word_embeddings": False, "eos_token_id": 0,
        },
        pard_token=RESERVED, rows=(RESERVED + 6, RESERVED + 14), adds_bos=True,
        tensors={"lm_head.weight": True, "model.layers.0.self_attn.v_proj.bias": True},
    ),
}  # fmt: skip
each_family = pytest.mark.parametrize("name", FAMILIES)


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the family's special tokens; Llama's fill the embedding to the last row."""
    inner: Tokenizer = tiny_tokenizer().backend_tokenizer
    special = ["<|bos|>", "<|endoftext|>"]  # `transformers` adds <|endoftext|> to a Qwen2 tokenizer that lacks it
    if family.rows[0] == RESERVED + 4:
        special += [*(f"<|reserved_special_token_{index}|>" for index in range(3)), "<|eom|>"]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if family.adds_bos:
        inner.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=TEMPLATE
    )


def write(folder: Path, family: Family, rows: int, weights: dict[str, torch.Tensor], **further: object) -> None:
    """A model folder as published: config, generation config, weights, tokenizer."""
    sizes = {
        "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.3, "bos_token_id": BOS, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.45.0", "vocab_size": rows,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes | family.config | further))
    ends = {"bos_token_id": BOS, "eos_token_id": family.ends, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)
    if weights:
        own = model.state_dict()
        model.load_state_dict({key: value[: own[key].shape[0]] for key, value in weights.items()})
    published = {name: (folder / name).read_bytes() for name in ("config.json", "generation_config.json")}
    model.save_pretrained(folder)
    for name, content in published.items():
        (folder / name).write_bytes(content)
    tokenizer_of(family).save_pretrained(folder)


@pytest.fixture(scope="module", params=list(FAMILIES))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family's name and the folders `target` and `draft`: the same weights, the draft's disturbed."""
    family, root = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    few, many = family.rows
    write(root / "target", family, many, {})
    weights = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float64).state_dict()
    noise = torch.Generator().manual_seed(2)
    disturbed = {key: value + 0.02 * torch.randn(value.shape, generator=noise) for key, value in weights.items()}
    write(root / "draft", family, few, disturbed)
    return request.param, root


def assert_lossless(root: Path, draft: Path) -> Engine:
    """Drafting changes no token, greedy or sampled, and some drafts are accepted."""
    plain = load(str(root / "target"), runtime=EXACT)
    drafted = load(str(root / "target"), drafter="pard", draft=str(draft), k=5, runtime=EXACT, lengths="fixed")
    accepted = 0
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.95, seed=3)):
        for prompt in ("helloworld", "abc"):
            expected = plain.generate(prompt, max_new_tokens=24, sampling=sampling).tokens
            answer = drafted.generate(prompt, max_new_tokens=24, sampling=sampling)
            assert answer.tokens == expected
            accepted += sum(answer.stats.accepted)
    assert accepted, "nothing was ever accepted, so the equality shows nothing"
    return drafted


@each_family
def test_the_recipe_is_the_papers(name: str) -> None:
    """Guards against a recipe that cannot be read, and against settings that left the paper (section 4.1)."""
    recipe = load_recipe(PardRecipe, templates_of("pard")[name], [])
    assert (recipe.k, recipe.r, recipe.r_min, recipe.average) == (8, 0.7, 0.2, "token_mean")
    assert (recipe.epochs, recipe.samples_per_step, recipe.loss) == (4, 64, None)
    assert (recipe.max_length, recipe.optimizer, recipe.device) == (FAMILIES[name].max_length, "adamw", "auto")
    assert (recipe.lr, recipe.mask_token_id) == (FAMILIES[name].lr, 128020 if name.startswith("llama") else None)


def test_a_family_trains_and_decodes(models: tuple[str, Path], tmp_path: Path) -> None:
    """Guards the recipes on what their families are special for: rotary scaling, biases, norms of queries and keys, a
    head of its own, several ends, an embedding without a free row or padded otherwise than the target's."""
    name, root = models
    family = FAMILIES[name]
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "worldabcabcabc"}]
    data.write_text(json.dumps({"prompt": "hello", "response": "worldabcabc"}) + "\n", encoding="utf-8")
    if not family.adds_bos:
        data.write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    smaller = [f"model={root / 'draft'}", f"data=[{data}]", f"out={tmp_path / 'pard'}", "device=cpu"]
    smaller += ["epochs=null", "steps=2", "samples_per_step=2", "samples_per_pass=2", "held_out=0"]
    as_published = load_recipe(PardRecipe, templates_of("pard")[name], [])
    if as_published.mask_token_id is not None:
        smaller.append(f"mask_token_id={family.pard_token}")
    recipe: PardRecipe = load_recipe(PardRecipe, templates_of("pard")[name], [*smaller, "bf16=false"])
    train_pard(recipe, lambda progress: None)
    config = AutoConfig.from_pretrained(recipe.out)
    assert (config.mask_token_id, config.vocab_size) == (family.pard_token, family.rows[0])
    assert config.rope_parameters == AutoConfig.from_pretrained(root / "draft").rope_parameters
    saved = dict(AutoModelForCausalLM.from_pretrained(recipe.out).named_parameters())
    assert {tensor: tensor in saved for tensor in family.tensors} == family.tensors
    drafted = assert_lossless(root, recipe.out)
    assert drafted.target.eos_ids == ({family.ends} if isinstance(family.ends, int) else set(family.ends))


def test_a_published_drafter_loads_as_it_is(models: tuple[str, Path], tmp_path: Path) -> None:
    """Guards AMD's drafters: their training code writes `pard_token` and `spd_type`, and no `mask_token_id`."""
    name, root = models
    published = tmp_path / "published"
    shutil.copytree(root / "draft", published)
    config = json.loads((published / "config.json").read_text())
    further = {"pard_token": FAMILIES[name].pard_token, "spd_type": "pard"}
    (published / "config.json").write_text(json.dumps(config | further))
    drafted = assert_lossless(root, published)
    assert drafted.drafter.mask_id == FAMILIES[name].pard_token
    with pytest.raises(ValueError, match="names no mask token"):
        load(str(root / "target"), drafter="pard", draft=str(root / "draft"), runtime=EXACT, lengths="fixed")


def test_rotary_scaling_is_read_from_a_published_config(models: tuple[str, Path], tmp_path: Path) -> None:
    """Control: without the family's rotary settings the same weights say something else, so reading them matters."""
    name, root = models
    plain = tmp_path / "plain"
    shutil.copytree(root / "target", plain)
    config = json.loads((plain / "config.json").read_text())
    changed = {"rope_scaling": None} if name == "llama-3.2" else {"rope_theta": 37.0}
    (plain / "config.json").write_text(json.dumps(config | changed))
    texts = torch.arange(60)[None] % VOCAB
    logits = [AutoModelForCausalLM.from_pretrained(folder)(texts).logits for folder in (root / "target", plain)]
    assert not torch.allclose(logits[0], logits[1], atol=1e-2)

"""Block drafters against a plain computation of their layers, and published folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.drafters.dflash import DFlashDrafter
from paradraft.drafters.parts import block_layers
from paradraft.drafters.parts.block_layers import block_model
from paradraft.engine.loader import load
from paradraft.formats.block import BlockSettings
from paradraft.formats.head import Head, TargetIdentity, write_head
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config

Array = NDArray[np.float64]
PROMPTS = ([5], [7, 9, 11, 13, 2], list(range(1, 14)), [8, 3] * 40)
RUNTIMES = {
    "eager, float64": Runtime(dtype="float64", compiled=False),
    "eager, float32": Runtime(dtype="float32", compiled=False),
    "C++, float32": Runtime(dtype="float32"),
    "C++, float32, narrow": Runtime(dtype="float32", width=3),
    "compiled, float32": Runtime(dtype="float32", compiled=True),
}


def settings_for(
    target: Path, *, causal: bool = False, anchor_first: bool = False, target_layers: tuple[int, ...] = (1,)
) -> BlockSettings:
    """Two layers of other head sizes than the target's."""
    config = load_config(str(target))
    sizes = {
        "hidden_size": config.hidden_size, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    return BlockSettings(
        sizes=sizes,
        layers=2,
        target_layers=target_layers,
        mask_token_id=3,
        k=4,
        causal=causal,
        anchor_first=anchor_first,
    )


def random_weights(settings: BlockSettings) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint, norms included, in float32."""
    body: Any = block_model(settings, torch.float32).model
    width, count = settings.width, len(settings.target_layers)
    shapes = {name: like.shape for name, like in body.state_dict().items() if not name.startswith("embed_tokens")}
    shapes |= {"fc.weight": (width, count * width), "hidden_norm.weight": (width,)}
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def plain(weights: dict[str, torch.Tensor], settings: BlockSettings, states_PX: Array, block_WD: Array) -> Array:
    """States `[W, D]` of a block after a context of P states; x of `attention` are `[…, H, d]`."""
    w = {name: weight.double().numpy() for name, weight in weights.items()}
    sizes, P, W = settings.sizes, len(states_PX), len(block_WD)
    eps, d = sizes["rms_norm_eps"], sizes["head_dim"]
    groups = sizes["num_attention_heads"] // sizes["num_key_value_heads"]

    def turned(x: Array, first: int) -> Array:
        positions = np.arange(first, first + len(x))[:, None]
        angles = positions * sizes["rope_parameters"]["rope_theta"] ** (-np.arange(0, d, 2) / d)
        cosines, sines = (np.concatenate([each, each], -1)[:, None] for each in (np.cos(angles), np.sin(angles)))
        return x * cosines + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sines

    sees = np.ones((W, P + W), dtype=bool)
    if settings.causal:
        sees[:, P:] = np.tril(sees[:, P:])
    f = rms(states_PX @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = block_WD
    for layer in range(settings.layers):
        at = f"layers.{layer}."
        normed = rms(x, w[at + "input_layernorm.weight"], eps)
        q, k, v = ((normed @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(W, -1, d) for n in "qkv")
        of_f = [(f @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(P, k.shape[1], d) for n in "kv"]
        key_norm = w[at + "self_attn.k_norm.weight"]
        q = turned(rms(q, w[at + "self_attn.q_norm.weight"], eps), P)
        k = np.concatenate([turned(rms(of_f[0], key_norm, eps), 0), turned(rms(k, key_norm, eps), P)])
        v = np.concatenate([of_f[1], v])
        k, v = (np.repeat(each, groups, axis=1) for each in (k, v))
        scores = np.where(sees, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d), -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(W, -1)
        x = x + attended @ w[at + "self_attn.o_proj.weight"].T
        normed = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], eps)


def expected(
    drafter: DFlashDrafter, model: Any, weights: dict[str, torch.Tensor], text: list[int], *, layer: int = 0
) -> Array:
    """`[K, D]` of a drafter after a text; `layer` is a planted fault, the states of layers after."""
    settings = drafter._layers.settings
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        embedded = (
            model.get_input_embeddings()(torch.tensor([text[-1], *[settings.mask_token_id] * 4])).double().numpy()
        )
    states = torch.cat([hidden[each + layer][0, :-1] for each in settings.target_layers], dim=-1).double().numpy()
    states = np.zeros((0, states.shape[1])) if len(text) == 1 else states
    first = settings.first
    return plain(weights, settings, states, embedded[: 4 + first])[first : first + 4]


BLOCKS = ((True, True), (False, False), (False, True), (True, False))
"""Whether a block is causal, and whether the anchor drafts."""
CASES = [
    (runtime, *block) for runtime in RUNTIMES for block in BLOCKS if "compiled" not in runtime or len(set(block)) == 1
]
"""Compiled passes take long to compile, so they have the two kinds that are in use."""


@pytest.mark.parametrize(("runtime", "causal", "anchor_first"), CASES)
def test_it_computes_its_layers(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, causal: bool, anchor_first: bool
) -> None:
    """Guards layers, positions and places that are shifted by one, which lose acceptance and nothing else: right after
    prompts, among rows of other lengths, and after rounds that have accepted some tokens."""
    monkeypatch.setattr(block_layers, "PREFILL_CHUNK", 32)
    settings = settings_for(family / "target", causal=causal, anchor_first=anchor_first, target_layers=(0, 1))
    weights = random_weights(settings)
    identity = TargetIdentity.of(load_config(str(family / "target")))
    write_head(tmp_path, Head(config={"model_type": "dflash"} | settings.entries(), target=identity, weights=weights))
    engine = load(
        str(family / "target"), drafter="dflash", draft=str(tmp_path), k=4, runtime=RUNTIMES[runtime], lengths="fixed"
    )
    exact = load(str(family / "target"), drafter="none", runtime=RUNTIMES["eager, float64"]).target.lm.model
    batch = engine.new_batch()
    drafter: Any = batch.drafter
    batch.join([Generation(Request(id=row, tokens=prompt, max_new_tokens=40)) for row, prompt in enumerate(PROMPTS)])
    tolerance = 1e-5 if "float64" in runtime else 2e-3
    for _ in range(3):
        found = drafter._layers.outputs([4, 4, 0, 4]).double().numpy()
        for row in (0, 1, 3):
            text = [*batch.generations[row].request.tokens, *batch.generations[row].tokens]
            right = expected(drafter, exact, weights, text)
            np.testing.assert_allclose(found[row], right, rtol=tolerance, atol=tolerance)
            if len(text) > 1:
                assert np.abs(expected(drafter, exact, weights, text, layer=1) - right).max() > 0.1
                assert np.abs(expected(drafter, exact, weights, text[1:]) - right).max() > 0.05
        batch.step()


def published(folder: Path, target: Path, settings: BlockSettings, **entries: Any) -> dict[str, torch.Tensor]:
    """Writes a folder with the keys of z-lab's, and returns its weights."""
    config = load_config(str(target))
    weights = random_weights(settings)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    sizes = {name: value for name, value in settings.sizes.items() if name != "rope_parameters"}
    own = {"mask_token_id": settings.mask_token_id, "target_layer_ids": [each - 1 for each in settings.target_layers]}
    text = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": settings.k + 1,
        "num_target_layers": config.num_hidden_layers, "num_hidden_layers": settings.layers, "rope_theta": 500.0,
        "rope_scaling": None, "vocab_size": config.vocab_size, "attention_bias": False, "dflash_config": own,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes | text | entries), encoding="utf-8")
    return weights


def test_published_folders_load(family: Path, tmp_path: Path) -> None:
    """Guards folders of other trainers: ids of layers from 0 on, a block that sees itself, and masks that all draft."""
    settings = settings_for(family / "target")
    weights = published(tmp_path / "draft", family / "target", settings)
    runtime = RUNTIMES["eager, float64"]
    engine = load(str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"), k=4, runtime=runtime)
    batch = engine.new_batch()
    drafter: Any = batch.drafter
    assert drafter._layers.settings == settings and drafter.max_k == 4
    batch.join([Generation(Request(tokens=PROMPTS[1]))])
    found = drafter._layers.outputs([4])[0].double().numpy()
    np.testing.assert_allclose(
        found, expected(drafter, engine.target.lm.model, weights, PROMPTS[1]), rtol=1e-5, atol=1e-5
    )


def with_head(folder: Path, settings: BlockSettings, rows: int, **entries: Any) -> dict[str, torch.Tensor]:
    """Makes a folder of `published` one of DSpark, and returns its Markov head, as published."""
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(3)
    head = {f"markov_head.markov_w{part}.weight": torch.randn(rows, 5, generator=generator) for part in (1, 2)}
    others = {
        "confidence_head.proj.weight": torch.randn(1, settings.width + 5),
        "confidence_head.proj.bias": torch.ones(1),
    }
    save_file(weights | head | others, folder / "model.safetensors")
    own = config.pop("dflash_config")
    text = {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_rank": 5, "markov_head_type": "vanilla"}
    (folder / "config.json").write_text(json.dumps(config | own | text | entries))
    return head


@pytest.mark.parametrize("anchor_first", [True, False])
def test_published_folders_of_dspark_load(family: Path, tmp_path: Path, anchor_first: bool) -> None:
    """Guards a Markov head that is left out, or corrects a token by another than the one before: by hand here."""
    settings = settings_for(family / "target", anchor_first=anchor_first)
    published(tmp_path / "draft", family / "target", settings)
    rows = load_config(str(family / "target")).vocab_size
    size = {} if anchor_first else {"sample_from_anchor": False, "block_size": 5}
    head = with_head(tmp_path / "draft", settings, rows, **size)
    engine = load(
        str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"), k=4, lengths="fixed",
        runtime=RUNTIMES["eager, float64"],
    )  # fmt: skip
    batch = engine.new_batch()
    drafter: Any = batch.drafter
    assert drafter._layers.settings == settings and drafter.max_k == 4
    before, after = (head[f"markov_head.markov_w{part}.weight"].double() for part in (1, 2))
    changed = 0
    for prompt in PROMPTS:
        batch.clear()
        batch.join([Generation(Request(tokens=prompt, max_new_tokens=9))])
        draft = drafter.propose([4]).tokens[0].tolist()
        plain_KV = drafter._head(drafter._layers.outputs([4]))[0]
        token = prompt[-1]
        for place in range(4):
            corrected_V = plain_KV[place] + (after @ before[token])[: plain_KV.shape[1]]
            changed += int(corrected_V.argmax() != plain_KV[place].argmax())
            token = int(corrected_V.argmax())
            assert draft[place] == token
    assert changed > 3


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_what_a_folder_has_of_the_target_is_used(family: Path, tmp_path: Path, name: str) -> None:
    """Guards a folder with other embeddings, or another output head, than the target's."""
    published(tmp_path / "draft", family / "target", settings_for(family / "target"))
    runtime = RUNTIMES["eager, float64"]

    def drafts() -> list[list[int]]:
        engine = load(
            str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"), k=4, runtime=runtime,
            lengths="fixed",
        )  # fmt: skip
        batch = engine.new_batch()
        batch.join([Generation(Request(tokens=prompt)) for prompt in PROMPTS])
        found: list[list[int]] = batch.drafter.propose([4] * len(PROMPTS)).tokens.tolist()
        return found

    without, weights = drafts(), load_file(tmp_path / "draft" / "model.safetensors")
    model: Any = load(str(family / "target"), drafter="none", runtime=runtime).target.lm.model
    of_target = model.lm_head.weight if name == "lm_head.weight" else model.model.embed_tokens.weight
    for rolled, is_same in ((0, True), (7, False)):
        own = of_target.detach().roll(rolled, 0).contiguous()
        save_file(weights | {name: own}, tmp_path / "draft" / "model.safetensors")
        assert (drafts() == without) is is_same
    save_file(weights | {name: own[:-1].contiguous()}, tmp_path / "draft" / "model.safetensors")
    with pytest.raises(ValueError, match="has the shape"):
        drafts()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"markov_head_type": "gated"}, "has a Markov head of the type 'gated', and only vanilla is read"),
        ({"markov_rank": None}, "markov_rank in its config.json is None"),
        ({"markov_rank": 6}, "markov.embedding.weight has the shape"),
        ({"block_size": 0}, "k in its config.json is 0"),
        ({"sample_from_anchor": "no"}, "anchor_first in its config.json is 'no'"),
        ({"is_causal": 1}, "causal in its config.json is 1"),
        ({"target_layer_ids": None}, "target_layer_ids in its config.json is None"),
    ],
)
def test_damaged_folders_of_dspark_are_refused(
    family: Path, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    settings = settings_for(family / "target", anchor_first=True)
    published(tmp_path / "draft", family / "target", settings)
    with_head(tmp_path / "draft", settings, load_config(str(family / "target")).vocab_size, **entries)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "decides between None tokens, and only 16 are computed"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "has the architectures ['Qwen3ForCausalLM']"),
        ({"architectures": ["DFlashDraftModel", "other"]}, "has the architectures"),
        ({"architectures": "DFlashDraftModel"}, "has the architectures"),
        ({"dflash_config": None}, "has no dflash_config in its config.json"),
        ({"markov_rank": 4}, "is of DFlash and has entries of DSpark's"),
        ({"sample_from_anchor": True}, "is of DFlash and has entries of DSpark's"),
        ({"rope_scaling": "x"}, "rope_parameters in its config.json is"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"attention_bias": True}, "biases or another activation"),
        ({"hidden_act": "gelu"}, "biases or another activation"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters in its config.json is"),
        ({"rope_theta": "500"}, "rope_parameters in its config.json is"),
        ({"hidden_size": None}, "hidden_size in its config.json is None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps in its config.json is '1e-5'"),
        ({"num_attention_heads": 0}, "num_attention_heads in its config.json is 0"),
        ({"num_attention_heads": 3}, "num_attention_heads in its config.json is 3"),
        ({"head_dim": 15}, "head_dim in its config.json is 15"),
        ({"max_position_embeddings": 4}, "has room for 4 tokens: load the target with capacity=4"),
        ({"num_hidden_layers": 3000}, "num_hidden_layers in its config.json is 3000"),
        ({"num_hidden_layers": 1}, "its config.json has 1 layers, its weights 2"),
        ({"block_size": 1000}, "k in its config.json is 999"),
        ({"block_size": None}, "k in its config.json is None"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding window"),
        ({"num_target_layers": 99}, "was trained for another target"),
        ({"block_size": 1}, "k in its config.json is 0"),
        ({"num_hidden_layers": 3}, "its config.json has 3 layers, its weights 2"),
        ({"intermediate_size": 20_000_000}, "has the shape"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids in its config.json is None"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-2]}},
            "target_layer_ids in its config.json is [-2]",
        ),
        ({"dflash_config": {"mask_token_id": 10**6, "target_layer_ids": [0]}}, "mask_token_id 1000000, but"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "causal": "false"}},
            "causal in its config.json is 'false'",
        ),
    ],
)
def test_other_folders_are_refused(family: Path, tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    """Guards a folder of a relative, or of another target, against wrong drafts and a traceback."""
    published(
        tmp_path / "draft",
        family / "target",
        settings_for(family / "target"),
        **entries,
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"))


@pytest.mark.parametrize("name", ["junk.weight", "layers.0.self_attn.q_proj.bias", "markov_head.markov_w1.weight"])
def test_weights_that_would_be_left_out_are_refused(family: Path, tmp_path: Path, name: str) -> None:
    """Guards a relative with one part more, which would draft badly without it."""
    weights = published(tmp_path / "draft", family / "target", settings_for(family / "target"))
    save_file(weights | {name: torch.ones(2)}, tmp_path / "draft" / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"has the weight {name}, which its kind has not")):
        load(str(family / "target"), drafter="dflash", draft=str(tmp_path / "draft"))


def test_a_published_block_limits_k(family: Path, tmp_path: Path) -> None:
    """Guards folders with a small block, used without a name and without K."""
    settings = settings_for(family / "target")
    published(tmp_path / "draft", family / "target", settings)
    engine = load(str(family / "target"), draft=str(tmp_path / "draft"))
    assert (engine.speculation.drafter, engine.speculation.k) == ("dflash", 4)
    plain_tokens = load(str(family / "target"), drafter="none").generate("hello", max_new_tokens=20).tokens
    assert engine.generate("hello", max_new_tokens=20).tokens == plain_tokens

"""What a draft takes over from where it comes from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from paradraft.engine.loader import load
from paradraft.train.init.init_draft import make
from paradraft.train.init.init_from import PretrainedSibling, PrunedTarget, RandomInit
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.targets import EXACT, KINDS, read, write_model


@torch.no_grad()
def run_layers(model: PreTrainedModel, tokens: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """The logits of a model that goes through some of its layers, by hand."""
    inner, length = model.model, tokens.shape[1]
    hidden = inner.embed_tokens(tokens)
    angles = inner.rotary_emb(hidden, torch.arange(length)[None])
    mask = torch.full((1, 1, length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
    for index in layers:
        hidden = inner.layers[index](hidden, attention_mask=mask, position_embeddings=angles)
    return model.lm_head(inner.norm(hidden))


# layers of the target


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_draft_is_the_target_without_some_layers(tmp_path: Path, kind: str) -> None:
    """Guards against layers in a wrong order or with a wrong index (then two layers share a slot of the cache), and a
    lost norm, bias or head: logits are those of the kept layers run by hand, decoding with a cache included."""
    target = write_model(tmp_path / "target", kind)
    made = make(target, tmp_path / "out", PrunedTarget(layers=3))
    assert made.layers == (0, 3, 5)
    whole, cut = read(target), read(tmp_path / "out")
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = run_layers(whole, tokens, [0, 3, 5])
    with torch.no_grad():
        torch.testing.assert_close(cut(tokens).logits, expected, rtol=1e-9, atol=1e-9)
        cache = cut(tokens[:, :12], use_cache=True).past_key_values
        later = cut(tokens[:, 12:], past_key_values=cache).logits
        torch.testing.assert_close(later, expected[:, 12:], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(run_layers(whole, tokens, list(range(6))), whole(tokens).logits)
        for other in ([0, 2, 5], [0, 5, 3], [0, 3, 5, 5]):
            assert not torch.allclose(run_layers(whole, tokens, other), expected, atol=1e-3), "the control must differ"


def test_per_layer_settings_are_cut_to_the_same_layers(tmp_path: Path) -> None:
    """Guards configs whose lists no longer fit the layers: `transformers` and vLLM refuse them."""
    target = write_model(tmp_path / "target", "qwen2", max_window_layers=4)
    make(target, tmp_path / "out", PrunedTarget(every=2))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["layer_types"]) == (4, ["full_attention"] * 4)
    assert config["max_window_layers"] == 2, "layers 0 and 2 stood below the limit of 4"


@pytest.mark.parametrize(
    ("cut", "number", "kept"),
    [
        (PrunedTarget(layers=1), 8, [0]),
        (PrunedTarget(layers=2), 8, [0, 7]),
        (PrunedTarget(layers=8), 8, list(range(8))),
        (PrunedTarget(layers=7), 8, [0, 1, 2, 4, 5, 6, 7]),
        (PrunedTarget(layers=1), 1, [0]),
        (PrunedTarget(), 1, [0]),
        (PrunedTarget(), 6, [0, 5]),
        (PrunedTarget(every=1), 3, [0, 1, 2]),
        (PrunedTarget(every=4), 24, [0, 4, 8, 12, 16, 20, 23]),
        (PrunedTarget(every=8), 8, [0, 7]),
    ],
)
def test_which_layers_are_kept(cut: PrunedTarget, number: int, kept: list[int]) -> None:
    """Guards the first layer, the last and the count."""
    assert list(cut.of(number)) == kept


def test_kept_layers_are_evenly_spaced() -> None:
    """Guards against a layer kept twice and gaps that differ by more than one, for every number of layers."""
    for number in range(1, 81):
        for wanted in range(1, number + 1):
            kept = PrunedTarget(layers=wanted).of(number)
            gaps = [later - earlier for earlier, later in pairwise(kept)]
            assert len(kept) == wanted and kept[0] == 0 and (wanted == 1 or kept[-1] == number - 1)
            assert not gaps or (1 <= min(gaps) and max(gaps) - min(gaps) <= 1)


# a fresh config


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_draft_is_small_and_of_the_targets_kind(tmp_path: Path, kind: str) -> None:
    """Guards its use as a draft: the target's ids, ends and room, and nothing of the target's sizes."""
    target = write_model(tmp_path / "target", kind)
    made = make(target, tmp_path / "out", RandomInit(layers=3, hidden_size=24, heads=2))
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == (kind, 3, 24)
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_id) == (VOCAB + 8, 128, 0)
    assert config.intermediate_size == 64 and config.tie_word_embeddings
    model = read(tmp_path / "out")
    assert made.parameters == model.num_parameters() and made.target_parameters == read(target).num_parameters()
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (24, 24)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    """Guards against a run that cannot be repeated, and against moving the caller's random numbers."""
    target = write_model(tmp_path / "target")
    before = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(target, tmp_path / name, RandomInit(hidden_size=16, heads=2, layers=1, seed=seed))
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"heads": 3}, "heads=3 do not divide hidden_size=256 into even parts.*hidden_size=258"),
        ({"hidden_size": 12, "heads": 4}, "even parts.*hidden_size=16"),
        ({"heads": 0}, "heads=0: use at least 1"), ({"hidden_size": -8}, "hidden_size=-8"),
        ({"layers": 0}, "layers=0"), ({"intermediate_size": 0}, "intermediate_size=0"), ({"seed": -1}, "seed=-1"),
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(sizes: dict[str, int], complaint: str) -> None:
    """Guards against errors from inside a model, or heads of odd width that rotary positions cannot turn."""
    with pytest.raises(ValueError, match=complaint):
        RandomInit(**sizes)


def test_a_draft_larger_than_its_target_is_refused(tmp_path: Path) -> None:
    """Guards against sizes with a digit too many, before memory is asked for them; the largest that fits is made."""
    target = write_model(tmp_path / "target", "llama")
    for sizes in ({"hidden_size": 10**9}, {"layers": 10**12}, {"intermediate_size": 10**9}):
        with pytest.raises(ValueError, match=r"larger than the target with its [0-9,]+ parameters"):
            make(target, tmp_path / "out", RandomInit(**{"hidden_size": 16, "heads": 2, **sizes}))
    made = make(target, tmp_path / "out", RandomInit(layers=8, hidden_size=32, heads=4, intermediate_size=16))
    assert 0.8 < made.parameters / made.target_parameters < 1


def test_rotary_factors_of_each_dimension_are_refused(tmp_path: Path) -> None:
    """Guards against a draft of a target that cannot be decoded here; factors for each dimension would not fit smaller
    heads either."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = write_model(tmp_path / "target", "llama", rope_parameters=rope)
    for heads in (2, 3):
        with pytest.raises(ValueError, match="rotary embedding of the type 'longrope', which is not supported"):
            make(target, tmp_path / "out", RandomInit(layers=1, hidden_size=24, heads=heads))
    assert not (tmp_path / "out").exists()


# a sibling


@pytest.mark.parametrize("rows", [VOCAB + 20, VOCAB + 3, VOCAB])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_sibling_gets_the_targets_rows(tmp_path: Path, rows: int, kind: str) -> None:
    """Guards vLLM's check of equal vocabularies, tied and untied: padded or cut, the tokens' logits stay."""
    target = write_model(tmp_path / "target", rows=rows)
    small = write_model(tmp_path / "small", kind, layers=1)
    made = make(target, tmp_path / "out", PretrainedSibling(name=small), mask_token=False)
    before, after = read(small), read(tmp_path / "out")
    assert after.config.vocab_size == after.lm_head.weight.shape[0] == made.rows == made.target_rows == rows
    tokens = torch.arange(VOCAB)[None]
    with torch.no_grad():
        torch.testing.assert_close(after(tokens).logits[..., :VOCAB], before(tokens).logits[..., :VOCAB])
        assert (after(tokens).logits.argmax(-1) < VOCAB + 8).all(), "an added row is never the likeliest"


def test_rows_in_use_are_not_cut_off(tmp_path: Path) -> None:
    """Guards tokens, and a trained mask token, that the smaller embedding has no row for."""
    target = write_model(tmp_path / "target", rows=VOCAB + 2)
    small = write_model(tmp_path / "small", layers=1, rows=VOCAB + 8, pard_token=VOCAB + 5)
    with pytest.raises(ValueError, match=f"uses {VOCAB + 6} rows of its embedding, .* has {VOCAB + 2}"):
        make(target, tmp_path / "out", PretrainedSibling(name=small))
    larger = tiny_tokenizer()
    larger.add_tokens(["<think>", "<answer>", "<tool>"])
    small = write_model(tmp_path / "thinks", layers=1)
    larger.save_pretrained(small)
    with pytest.raises(ValueError, match=f"uses {VOCAB + 3} rows"):
        make(target, tmp_path / "out", PretrainedSibling(name=small))
    assert not (tmp_path / "out").exists()


def test_a_trained_drafter_stays_one(tmp_path: Path) -> None:
    """Guards published PARD drafters that are padded for a target: mask token and its embedding come along."""
    target = write_model(tmp_path / "target", rows=VOCAB + 20)
    small = write_model(tmp_path / "small", layers=1, pard_token=VOCAB + 5, spd_type="pard")
    made = make(target, tmp_path / "out", PretrainedSibling(name=small))
    assert (made.mask_id, made.mask_token, made.rows) == (VOCAB + 5, "its own", VOCAB + 20)
    assert AutoConfig.from_pretrained(tmp_path / "out").pard_token == VOCAB + 5
    assert torch.equal(read(tmp_path / "out").lm_head.weight[VOCAB + 5], read(small).lm_head.weight[VOCAB + 5])
    load(target, drafter="pard", draft=str(tmp_path / "out"), k=3, runtime=EXACT, lengths="fixed").generate(
        "hello", max_new_tokens=4
    )


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Guards against a draft whose tokens mean other letters than the target's."""
    target, small = write_model(tmp_path / "target"), write_model(tmp_path / "small", layers=1)
    file = tmp_path / "small" / "tokenizer.json"
    written = json.loads(file.read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(written))
    with pytest.raises(ValueError, match="has another vocabulary than"):
        make(target, tmp_path / "out", PretrainedSibling(name=small))

"""Attention to the text and to chains is that with a dense mask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.objectives import chain_attention
from paradraft.train.objectives.chain_attention import CHAINS, ChainMask, attention, chains_of
from paradraft.train.objectives.rows import FILLING, Rows, attention_mask, attention_rule
from tests.support.random_models import random_model

S, N, HEADS, KEY_HEADS, SIZE = 2, 7, 6, 3, 16
K = 4


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, depths and documents of rows in random order: some chains are cut, some groups end with padding."""
    generator = torch.Generator().manual_seed(5)
    both = []
    for group in range(S):
        of_chains = [(anchor, depth, anchor % 2) for anchor in range(N) for depth in range(K - (anchor + group) % 3)]
        order = torch.randperm(len(of_chains), generator=generator)
        both.append(torch.tensor(of_chains)[order])
    R = max(map(len, both)) + 3
    padding = torch.tensor([0, 0, FILLING])
    padded = torch.stack([torch.cat([some, padding.repeat(R - len(some), 1)]) for some in both])
    anchor, depth, document = padded.unbind(-1)
    return anchor, depth, document


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_a_dense_mask(causal: bool, first: int, dtype: torch.dtype) -> None:
    """Guards rows of another chain, document or group, tokens that are not seen, and a share of the text's keys that
    does not know the chain's. A row that sees nothing has finite numbers."""
    torch.manual_seed(0)
    anchor, depth, document = rows()
    R, positions = anchor.shape[1], torch.arange(N)
    sees_SRN = (positions < anchor[:, :, None]) & (positions % 2 == document[:, :, None])
    same = (anchor[:, :, None] == anchor[:, None]) & (document[:, :, None] == document[:, None])
    same &= (
        (depth[:, None] >= first) & (document >= 0)[:, :, None] & (not causal or depth[:, None] <= depth[:, :, None])
    )
    query, key, value = random(S, HEADS, R, SIZE), random(S, KEY_HEADS, N + R, SIZE), random(S, KEY_HEADS, N + R, SIZE)
    mask = ChainMask.of(sees_SRN, chains_of(anchor, depth, document, first=first, causal=causal), dtype)
    given = [each.to(dtype) for each in (query, key, value)]
    found, _ = attention(SimpleNamespace(), *given, mask, scaling=0.3)  # type: ignore[arg-type]
    sees = torch.cat([sees_SRN, same], dim=2)
    is_some = sees.any(2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *(each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value)),
        attn_mask=(sees | ~is_some[:, :, None])[:, None], scale=0.3,
    ).transpose(1, 2)  # fmt: skip
    assert found.isfinite().all() and int((~is_some).sum()) >= 3
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found[is_some].double(), expected[is_some], rtol=tolerance, atol=tolerance)
    weights = torch.randn(found.shape, dtype=torch.float64) * is_some[:, :, None, None]
    gradients = [
        torch.autograd.grad((output.double() * weights).sum(), (query, key, value)) for output in (found, expected)
    ]
    scale = max(float(each.abs().max()) for each in gradients[1])
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine / scale, right / scale, rtol=0, atol=tolerance)
        assert mine.abs().max() > 0.1


@pytest.mark.parametrize("fault", ["another row", "too late", "no log sum"])
def test_a_fault_would_be_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Controls: chains that are shifted by a row, that see what is behind, or that are not joined with the text."""
    if fault == "no log sum":
        monkeypatch.setattr(torch.Tensor, "logsumexp", lambda sums, dim: sums[0])
    else:
        true = chains_of

        def wrong(*args: Tensor, **settings: Any) -> chain_attention.Chains:
            chains = true(*args, **settings | ({"causal": False} if fault == "too late" else {}))
            members = chains.members.roll(1, 0) if fault == "another row" else chains.members
            return chain_attention.Chains(members=members, sees=chains.sees)

        monkeypatch.setitem(globals(), "chains_of", wrong)
    with pytest.raises(AssertionError):
        test_outputs_and_gradients_are_those_of_a_dense_mask(True, 0, torch.float32)


def test_rows_of_parallel_drafters_see_what_their_rule_says() -> None:
    """Guards the real tokens among rows in any order, which are the keys of the text."""
    torch.manual_seed(1)
    anchor, depth, document = rows()
    of = Rows(position=anchor + depth, depth=depth, document=document)
    model = random_model()
    model.set_attn_implementation(CHAINS)
    mask, R = attention_mask(of, model), anchor.shape[1]
    assert isinstance(mask, ChainMask) and mask.shape[-1] < R / 2
    query, key, value = (random(S, heads, R, SIZE, dtype=torch.float32) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    found, _ = attention(SimpleNamespace(), query, key, value, mask)  # type: ignore[arg-type]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *(each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value)),
        attn_mask=attention_rule(of)[:, None],
    ).transpose(1, 2)  # fmt: skip
    is_real = document >= 0
    torch.testing.assert_close(found[is_real], expected[is_real], rtol=1e-5, atol=1e-5)
    tokens_only = Rows(position=anchor, depth=torch.zeros_like(depth), document=document)
    assert not isinstance(attention_mask(tokens_only, model), ChainMask), "an ordinary model reads no chains"


@pytest.mark.parametrize("setting", [{"softcap": 30.0}, {"dropout": 0.1}])
def test_other_attention_is_refused(setting: dict[str, float]) -> None:
    anchor, depth, document = rows()
    chains, R = chains_of(anchor, depth, document, first=0), anchor.shape[1]
    mask, vectors = ChainMask.of(torch.ones(S, R, N) > 0, chains, torch.float32), random(S, HEADS, N + R, SIZE)
    with pytest.raises(ValueError, match="set attention=eager"):
        attention(SimpleNamespace(), vectors, vectors, vectors, mask, **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["plain", "dropout", "softcap"])
def test_models_of_other_attention_get_another(tmp_path: Path, kind: str) -> None:
    """Guards the default for targets such as Seed-OSS, whose config has dropout, and for models that cap scores."""
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    of_llama = LlamaConfig(**sizes, attention_dropout=0.1 if kind == "dropout" else 0.0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes)) if kind == "softcap" else LlamaForCausalLM(of_llama)
    recipe = PardRecipe(model="x", data=[tmp_path], out=tmp_path, steps=1)
    recipe.set_up_passes(model, on_gpu=False)
    expected = {"plain": CHAINS, "dropout": "sdpa", "softcap": "eager"}
    assert model.config._attn_implementation == expected[kind]
    anchor, depth, document = rows()
    mask = attention_mask(Rows(position=anchor + depth, depth=depth, document=document), model)
    tokens = torch.ones_like(anchor)
    assert bool(model.train()(tokens, attention_mask=mask, position_ids=anchor + depth).logits.isfinite().all())

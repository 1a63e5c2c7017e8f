"""Narrow MLPs keep what matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paradraft.train.init.init_draft import narrow
from tests.conftest import tiny_model

IDS = torch.arange(12)[None]


def with_biases() -> torch.nn.Module:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=72, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, mlp_bias=True
    )
    model = LlamaForCausalLM(config).double().eval()
    for layer in model.model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(linear.bias)
    return model


@pytest.mark.parametrize("model", [tiny_model(1), with_biases()], ids=["qwen3", "llama with biases"])
@torch.no_grad()
def test_neurons_that_write_nothing_go_first(model: torch.nn.Module, tmp_path: Path) -> None:
    """Guards the pairing of the three matrices, their biases and the config: without idle neurons all is as before,
    also when it is loaded again."""
    for index, layer in enumerate(model.model.layers):
        torch.nn.init.normal_(layer.post_attention_layernorm.weight)
        idle = torch.randperm(48, generator=torch.Generator().manual_seed(index))[:28]
        for part in idle.chunk(2):
            layer.mlp.down_proj.weight[:, part] = 0
        layer.mlp.up_proj.weight[idle] *= 100
    before = model(IDS).logits
    narrow(model, 20)
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=1e-12)
    assert model.model.layers[1].mlp.gate_proj.weight.shape == (20, 32)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(IDS).logits, before, rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_a_neuron_reads_counts_as_the_norm_lets_it_through() -> None:
    """Control: a neuron with the largest weights of all, which reads only what the norm takes away, is dropped."""
    model = tiny_model(1)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight[:8] = 0
        layer.mlp.gate_proj.weight[5] = 0
        layer.mlp.gate_proj.weight[5, :8] = 1e6
    before = model(IDS).logits
    narrow(model, 47)
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=1e-12)

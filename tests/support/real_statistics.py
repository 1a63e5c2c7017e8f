"""Random models with the statistics of trained ones: what random weights alone never meet.

States of a few tokens are hundreds of times as large in two channels as elsewhere (massive activations), and other
tokens attend to these (attention sinks); rows of special tokens are nearly zero; Qwen2's keys have biases in the tens;
vocabularies are large beside the width, and the head is the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.random_models import KINDS_OF_MODELS

MASSIVE = (5, 23)
"""Channels that are massive at some tokens."""
CONSTANT = 0
"""The channel that is the same at every token."""
SPECIAL = 17
"""Ids whose rows are nearly zero."""
VOCABULARIES = {"llama": 49_152, "llama with biases": 49_152, "qwen2": 151_936, "qwen3": 151_936}


def realistic_model(
    kind: str = "qwen2", dtype: torch.dtype = torch.float32, *, rows: int | None = None, tied: bool = True
) -> PreTrainedModel:
    """A model of three layers, of 64 channels, in evaluation mode.

    Args:
        kind: one of `KINDS_OF_MODELS`.
        dtype: of its weights.
        rows: of the embedding; by default as many as real models of the kind have.
        tied: whether the head is the embedding.
    """
    generator = torch.Generator().manual_seed(7)
    model_class, config_class, more = KINDS_OF_MODELS[kind]
    config = config_class(
        vocab_size=rows or VOCABULARIES[kind], hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=8192,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **more | {"tie_word_embeddings": tied},
    )  # fmt: skip
    model = model_class(config).requires_grad_(False)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.copy_((1 + normal(*weight.shape, scale=0.3)).abs())
        elif "bias" in name:
            weight.copy_(normal(*weight.shape, scale=20 if "k_proj" in name else 0.02))
        elif weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            weight.copy_(normal(*weight.shape, scale=weight.shape[1] ** -0.5))
    for table in {id(each): each for each in (model.model.embed_tokens.weight, model.lm_head.weight)}.values():
        table.copy_(normal(*table.shape, scale=0.05))
        table[:SPECIAL] *= 1e-3
    model.model.embed_tokens.weight[SPECIAL:, CONSTANT] = 0.1
    _add_massive(model)
    return model.to(dtype).eval()


def _add_massive(model: PreTrainedModel) -> None:
    """Has one neuron of the first layer write massive channels, and later layers attend to where they are.

    It reads little but the token itself, and its output grows with the square of that, so that few tokens have most of
    it.
    """
    first, *others = model.model.layers
    first.self_attn.o_proj.weight *= 0.1
    mlp = first.mlp
    mlp.gate_proj.weight[0] *= 8
    mlp.gate_proj.weight[0, CONSTANT] = 0
    mlp.up_proj.weight[0] = mlp.gate_proj.weight[0]
    mlp.down_proj.weight[list(MASSIVE), 0] = torch.tensor([4.0, -2.0])
    for layer in others:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[list(MASSIVE)] *= 0.3  # which trained layers read less than other channels
        attention = layer.self_attn
        queries = attention.q_proj.weight[:, CONSTANT].unflatten(0, (2, 2, -1)).mean(1).flatten()
        attention.k_proj.weight[:, MASSIVE[0]] += 4 * queries
    model.model.norm.weight[list(MASSIVE)] *= 0.1

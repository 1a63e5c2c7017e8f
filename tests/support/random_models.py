"""Random models of every architecture that is served, of awkward sizes."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS_OF_MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}
SIZES = [(64, 96, 4, 2, 16, 80), (45, 57, 3, 1, 22, 101), (160, 200, 2, 2, 144, 70), (54, 58, 3, 1, 22, 101)]
"""Width, inner width, heads, heads of keys and values, head size, rows of the embedding; no vector and no
panel divides those of the second and the last, and the second's are odd, which pairs of bfloat16 numbers are not."""


def random_model(
    kind: str = "qwen3", size: tuple[int, ...] = SIZES[0], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    torch.manual_seed(5)
    model_class, config_class, more = KINDS_OF_MODELS[kind]
    width, inner, heads, kv_heads, head_size, rows = size
    config = config_class(
        vocab_size=rows, hidden_size=width, intermediate_size=inner, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_size, max_position_embeddings=192, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, **more,
    )  # fmt: skip
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.to(dtype).eval().requires_grad_(False)

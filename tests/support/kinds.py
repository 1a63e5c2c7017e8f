"""A random model of every architecture, window and multiplier that is served, whatever computes its passes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paradraft.models.architectures import experts_settings
from tests.conftest import VOCAB

WINDOW = 48
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "olmo2": {}, "seed_oss": {"head_dim": 8}, "smollm3": {},
    "mistral": {"sliding_window": None},
    "mistral with windows": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "head_dim": 8},
    "phi3": {"sliding_window": None},
    "phi3 with windows": {"sliding_window": WINDOW},
    "qwen2 with windows": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3 with half windows": {"sliding_window": WINDOW, "use_sliding_window": False},
    "gemma3_text": {"layer_types": ["full_attention"] * 4, "head_dim": 8, "query_pre_attn_scalar": 11},
    "gemma3_text with a softcap": {
        "layer_types": ["full_attention"] * 4, "head_dim": 8, "final_logit_softcapping": 4.0,
    },
    "gemma3_text with windows": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "head_dim": 8},
    "qwen3_moe": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8,
        "mlp_only_layers": [2],
    },
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.7,
    },
}  # fmt: skip


def model_of(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCAB + 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model(kind.partition(" ")[0], **sizes | KINDS[kind] | settings)
    experts = experts_settings(torch.float64, config)  # which float32 has too
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **experts).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, dtype=dtype)
    return model

"""Targets to draft for, in each architecture."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from paradraft.models.runtime import Runtime
from tests.conftest import VOCAB, tiny_tokenizer

EXACT = Runtime(dtype="float64")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False, max_window_layers=4),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=16),
}


def write_model(folder: Path, kind: str = "qwen3", *, layers: int = 6, rows: int = VOCAB + 8, **further: object) -> str:
    config = type(KINDS[kind]).from_dict(
        {**KINDS[kind].to_dict(), "layer_types": None, "vocab_size": rows, "num_hidden_layers": layers, **further}
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def read(folder: Path | str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

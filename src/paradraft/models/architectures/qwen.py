"""Qwen 2 and 2.5, with biases of queries, keys and values; Qwen 3, with norms of queries and keys."""

from __future__ import annotations

from paradraft.models.architectures import DecoderSpec

SPECS = {
    "qwen2": DecoderSpec(is_in_cpp=True, gguf="qwen2", allows_vllm_layers=True),
    "qwen3": DecoderSpec(is_in_cpp=True, gguf="qwen3", allows_vllm_layers=True),
    "qwen3_moe": DecoderSpec(has_experts=True, allows_vllm_layers=True),
}

"""Llama, and families whose decoder differs in parts that only the model's own code sees."""

from __future__ import annotations

from paradraft.models.architectures import DecoderSpec

_LLAMA = DecoderSpec(is_in_cpp=True, gguf="llama", has_gguf_pairs=True, allows_vllm_layers=True)
SPECS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": DecoderSpec(),
    "olmo2": DecoderSpec(),
    "seed_oss": DecoderSpec(),
    "smollm3": DecoderSpec(),
}

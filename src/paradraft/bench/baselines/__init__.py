"""The peers of a benchmark: other engines on the same weights.

`hf` is plain `generate` of `transformers`, `hf-assisted` its assisted generation with an ordinary
draft model, `hf-prompt-lookup` its prompt lookup; `vllm` is vLLM without a drafter, `vllm-draft`,
`vllm-pard`, `vllm-ngram`, `vllm-medusa` and `vllm-eagle` are vLLM with one; `llama-cpp` is llama.cpp without,
`llama-cpp-draft` with a draft model.
"""

from __future__ import annotations

from dataclasses import dataclass

HF, ASSISTED, LOOKUP = "hf", "hf-assisted", "hf-prompt-lookup"
LLAMA_CPP = "llama-cpp"
CONFIDENCE = 0.4
"""Default confidence: after a token less likely than this the assistant of `transformers` stops drafting."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Properties of a peer that are known before it runs.

    Args:
        like: our own drafter that drafts in the same way, from the same draft model.
    """

    like: str
    settings: tuple[str, ...]


PEERS = {
    HF: Peer(like="none", settings=("dtype", "batch")),
    ASSISTED: Peer(like="autoregressive", settings=("dtype", "batch", "k", "draft", "confidence")),
    LOOKUP: Peer(like="ngram", settings=("dtype", "batch", "k")),
    "vllm": Peer(like="none", settings=("dtype", "batch")),
    "vllm-draft": Peer(like="autoregressive", settings=("dtype", "batch", "k", "draft")),
    "vllm-pard": Peer(like="pard", settings=("dtype", "batch", "k", "draft")),
    "vllm-eagle": Peer(like="eagle", settings=("dtype", "batch", "k", "draft")),
    "vllm-medusa": Peer(like="medusa", settings=("dtype", "batch", "k", "draft")),
    "vllm-ngram": Peer(like="ngram", settings=("dtype", "batch", "k")),
    LLAMA_CPP: Peer(like="none", settings=("dtype", "batch")),
    "llama-cpp-draft": Peer(like="autoregressive", settings=("dtype", "batch", "k", "draft")),
}


def is_vllm(name: str) -> bool:
    """Whether a method runs in vLLM's own process."""
    return name in PEERS and name.startswith("vllm")


def is_llama_cpp(name: str) -> bool:
    """Whether a method runs in llama.cpp's own process."""
    return name in PEERS and name.startswith(LLAMA_CPP)

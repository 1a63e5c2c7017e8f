"""Loads draft models that share the target's vocabulary."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from paradraft.formats.gguf import is_gguf, read_gguf
from paradraft.models.architectures import context_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.names import is_shape
from paradraft.models.runtime import STORED, Runtime
from paradraft.models.target import Target, TargetFacts
from paradraft.sources.gguf_tokenizer import check_same_tokens
from paradraft.sources.loading import config_of, is_in_few_bits, load_tokenizer
from paradraft.sources.target_loading import load_lm

_PROBE = "def f(x):\n    return 'Grüße, 世界' + str(x ** 2)  # 1234\n"


def load_draft_lm(folder: str, target: Target | TargetFacts, runtime: Runtime) -> CausalLM:
    """Loads a draft model; raises ValueError if its tokens or its capacity do not fit the target's."""
    needed = target.vocab_size
    check_draft_config(folder, config_of(folder), vocab_size=needed, capacity=target.capacity)
    _check_draft_tokens(folder, target)
    return load_lm(folder, draft_runtime(folder, runtime), needed, target.capacity)


def draft_runtime(folder: str, runtime: Runtime) -> Runtime:
    """The draft model's runtime: the target's, with the draft model's dtype."""
    if runtime.draft_dtype is None and is_in_few_bits(folder):
        return replace(runtime, dtype=STORED)
    return runtime.of_draft


def _check_draft_tokens(folder: str, target: Target | TargetFacts) -> None:
    if is_gguf(folder):  # its tokenizer's merges do not matter, and may not be known
        check_same_tokens(read_gguf(folder, vocabulary=True), target.tokenizer.get_vocab(), "the target")
    elif not is_shape(folder) and load_tokenizer(folder)(_PROBE)["input_ids"] != target.tokenizer(_PROBE)["input_ids"]:
        raise ValueError(
            f"draft {folder!r} splits text into other tokens than the target: use a draft of the same family"
        )


def check_draft_config(folder: str, config: PretrainedConfig, *, vocab_size: int, capacity: int) -> None:
    """Raises ValueError if a draft model's vocabulary or context length is smaller than the target's."""
    if config.vocab_size < vocab_size:
        raise ValueError(
            f"draft {folder!r} knows {config.vocab_size} tokens, the target {vocab_size}: use one of the same family"
        )
    if (room_for := context_of(config)) < capacity:
        raise ValueError(
            f"draft {folder!r} has room for {room_for} tokens, the target for {capacity}: set capacity={room_for}"
        )

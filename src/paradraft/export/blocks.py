"""Writes block drafters: their output heads, and files for llama.cpp; `paradraft.export.block_engines` has engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from paradraft.drafters.parts.block_layers import block_model
from paradraft.drafters.parts.draft_head import DOWN, UP
from paradraft.export.block_engines import architecture_for
from paradraft.export.engines import GGUF
from paradraft.export.gguf import end_metadata, model_metadata, write_tensors
from paradraft.export.gguf_vocabulary import metadata_of
from paradraft.formats.block import OWN_HEAD, BlockSettings
from paradraft.formats.head import Head
from paradraft.formats.path_heads import SELECTED, SELECTOR_RANK
from paradraft.formats.published_block import CONVOLUTION, published_weights
from paradraft.formats.vocab_map import D2T
from paradraft.models.quantized import as_numbers, of_outputs
from paradraft.sources.gguf_model import INNER
from paradraft.sources.target_loading import load_target

ARCHITECTURE = "dflash"
"""llama.cpp's name of all block drafters."""
OUTER = {
    "norm.weight": "output_norm.weight", "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight",
    "lm_head.weight": "output.weight", "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}  # fmt: skip
"""llama.cpp's names of weights, by their published names."""


CONVOLUTIONS = {
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection": "ffn_conv_proj.weight",
}  # fmt: skip
"""Its names of a layer's convolutions."""


def with_output_head(head: Head, target: str) -> Head:
    """The drafter with its output head `[U, D]` in bfloat16 as a weight, unless it is the whole one of `target`."""
    weights = {name: weight for name, weight in head.weights.items() if name not in (UP, DOWN)}
    if UP in head.weights:
        weights[OWN_HEAD] = (head.weights[UP].float() @ head.weights[DOWN].float()).bfloat16()
    elif D2T in head.weights:
        whole: Any = load_target(target).lm.model.lm_head.weight
        weights[OWN_HEAD] = as_numbers(of_outputs(whole, target_ids(head))).detach().bfloat16()
    return replace(head, weights=weights)


def target_ids(head: Head) -> Tensor:
    """`[U]` target ids of a reduced output head's rows."""
    offsets_U = head.weights[D2T]
    return offsets_U + torch.arange(len(offsets_U))


def write_block_gguf(
    file: Path,
    head: Head,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig,
    *,
    dtype: str,
) -> None:
    """Writes a drafter that `check_block` accepts as a file for llama.cpp.

    Args:
        head: with the output head that it needs, see `with_output_head`.
        tokenizer: the target's.
        generation: the target's, with its end tokens.
        dtype: of the matrices, one of `paradraft.export.gguf.TYPES`.

    Raises:
        ValueError: the tokenizer is of an unsupported kind.
    """
    settings, rows = BlockSettings.of(head), head.target.vocab_size
    config = block_model(settings, torch.float32, device="meta").config
    config.vocab_size = rows
    own: dict[str, Any] = {
        "block_size": settings.k + settings.first,
        "target_layers": list(settings.target_layers),
        "sample_from_anchor": settings.anchor_first,
        "has_confidence_head": False,
        "attention.causal": settings.causal,
    }
    if SELECTOR_RANK in head.config:
        own |= {"selector_rank": head.config[SELECTOR_RANK], "selector_top_k": SELECTED} | CONVOLUTION
    metadata = model_metadata(ARCHITECTURE, config, dtype=dtype, name=file.parent.name)
    metadata |= {f"{ARCHITECTURE}.{key}": value for key, value in own.items()}
    metadata |= metadata_of(tokenizer, rows, head.name) | end_metadata(generation, tokenizer.eos_token_id)
    metadata["tokenizer.ggml.mask_token_id"] = settings.mask_token_id
    tensors = {_name_of(name): weight for name, weight in published_weights(head, architecture_for(head, GGUF)).items()}
    if D2T in head.weights:
        tensors[D2T] = target_ids(head)
    write_tensors(file, ARCHITECTURE, metadata, tensors, dtype=dtype)


def _name_of(published: str) -> str:
    if published in OUTER:
        return OUTER[published]
    _, layer, part = published.removesuffix(".weight").split(".", 2)
    if part in CONVOLUTIONS:
        return f"blk.{layer}.{CONVOLUTIONS[part]}"
    theirs = {ours: theirs for theirs, ours in INNER.items()}
    return f"blk.{layer}.{theirs[part]}.weight"

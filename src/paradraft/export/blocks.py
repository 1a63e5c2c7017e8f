"""Exports block drafters: as a folder of DSpark's or DFlash 2's for vLLM, and as a file of DFlash's kind for llama.cpp.

Both compute DSpark's blocks (2607.05147), causal ones included, of which the anchor drafts or not; a drafter without a
head gets a Markov head of zeros. One with a selector becomes one of DFlash 2, of which masks draft all tokens. vLLM's
computation was read in its source (model_executor/models/qwen3_dspark.py, qwen3_dflash2.py,
v1/worker/gpu/spec_decode/dspark); it needs a GPU, and none has tried a folder yet. llama.cpp's drafts were compared
with ours (tests/e2e/test_llama_cpp_blocks.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from paradraft.drafters.parts.block_layers import block_model
from paradraft.drafters.parts.draft_head import DOWN, UP
from paradraft.export.gguf import end_metadata, model_metadata, write_tensors
from paradraft.export.gguf_vocabulary import metadata_of
from paradraft.formats.block import OWN_HEAD, BlockSettings
from paradraft.formats.head import Head
from paradraft.formats.path_heads import MARKOV_RANK, PREVIOUS_TOKEN_RANK, SELECTED, SELECTOR_RANK
from paradraft.formats.published_block import CONVOLUTION, DFLASH_2, DSPARK, published_weights
from paradraft.formats.vocab_map import D2T
from paradraft.models.quantized import as_numbers, of_outputs
from paradraft.sources.gguf_model import INNER
from paradraft.sources.loading import load_skeleton
from paradraft.sources.target_loading import load_target
from paradraft.traits import INSTEAD

METHOD = "dspark"
"""vLLM's name of the method of most."""
METHODS = {DSPARK: METHOD, DFLASH_2: "dflash"}
"""The methods by the architecture of a published folder; llama.cpp's names have "draft-" before them."""
ARCHITECTURE = "dflash"
"""llama.cpp's name of all block drafters."""
SCALES = ("embedding_multiplier", "logits_scaling", "logit_scale", "final_logit_softcapping")
"""Entries of a target's config that change its embeddings or logits."""
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


def check_block(head: Head, k: int, *, for_llama_cpp: bool = False) -> BlockSettings:
    """The settings of a drafter that vLLM or llama.cpp can serve; raises ValueError if it cannot draft k tokens with
    it."""
    settings, name, most = BlockSettings.of(head), head.name, head.target.num_hidden_layers
    check_k(settings, k, name)
    if PREVIOUS_TOKEN_RANK in head.config:
        raise ValueError(
            f"{name!r} has a previous-token head, which no engine reads: train it with {MARKOV_RANK} in its place"
        )
    if outside := [layer for layer in settings.target_layers if not 1 <= layer < most]:
        raise ValueError(
            f"{name!r} reads the target's layer {outside[0]}, and engines give those from 1 to {most - 1}: set "
            "target_layers in training"
        )
    if SELECTOR_RANK in head.config:
        _check_selector(settings, head, for_llama_cpp=for_llama_cpp)
    return settings


def _check_selector(settings: BlockSettings, head: Head, *, for_llama_cpp: bool) -> None:
    instead = f"train it with {MARKOV_RANK} in place of {SELECTOR_RANK}"
    if settings.anchor_first:
        raise ValueError(
            f"{head.name!r} has a selector, which engines read where masks draft all tokens: train it with "
            "anchor_first=false"
        )
    if settings.width % (group := CONVOLUTION["conv_group_size"]):
        raise ValueError(
            f"{head.name!r} has states of {settings.width} numbers, and engines want a multiple of {group}: {instead}"
        )
    if for_llama_cpp and settings.width < (least := SELECTED * (SELECTED + 1)):
        raise ValueError(
            f"{head.name!r} has states of {settings.width} numbers, and llama.cpp's selector needs {least}: {instead}"
        )
    if not for_llama_cpp and D2T in head.weights:
        raise ValueError(
            f"{head.name!r} drafts some of the target's tokens, and vLLM's selector decides between all: train it "
            f"without draft_vocab_size, or {instead.removeprefix('train it ')}"
        )


def check_k(settings: BlockSettings, k: int, name: str) -> None:
    """Raises ValueError if engines cannot draft k tokens with the drafter of this name."""
    if k > settings.k:
        raise ValueError(f"k={k}: {name!r} was trained to draft {settings.k} tokens: use at most as many")
    if not settings.causal and k < settings.k:
        raise ValueError(f"k={k}: blocks of {name!r} see themselves as a whole: use their size, k={settings.k}")


def check_unscaled(target: str) -> None:
    """Raises ValueError if a target scales its embeddings or logits, which engines leave out in drafters beside it."""
    skeleton = load_skeleton(target)
    scales = {name: getattr(skeleton.config, name, None) for name in SCALES}
    scales["scalar_embed_scale"] = getattr(skeleton.get_input_embeddings(), "scalar_embed_scale", None)
    if scaled := [name for name, scale in scales.items() if scale is not None and float(scale) != 1]:
        raise ValueError(
            f"{target!r} scales its embeddings or logits ({scaled[0]}), and no engine does so here: {INSTEAD}"
        )


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
    tensors = {_name_of(name): weight for name, weight in published_weights(head).items()}
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

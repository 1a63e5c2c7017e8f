"""Folders of block drafters as engines and other trainers have them: DFlash (Chen et al. 2026), DSpark (2607.05147).

Such a folder has a `config.json` of Qwen3 with one of these architectures, and names no weights of a target. A block of
DFlash is [anchor, mask, …], of which the masks draft, and all see each other; `dflash_config.causal` changes the
latter. In DSpark's the anchor drafts too, unless `sample_from_anchor` is false, and there is a Markov head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from paradraft.formats.block import (
    COUNTS,
    OWN_HEAD,
    SIZES,
    BlockSettings,
)
from paradraft.formats.head import CONFIG, WEIGHTS, Head, TargetIdentity, file_of, is_head, read_head, reading
from paradraft.formats.path_heads import MARKOV_EMBEDDING, MARKOV_OUTPUT, MARKOV_RANK
from paradraft.formats.vocab_map import D2T

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
OTHERS = {"DFlash2DraftModel": "DFlash 2"}
"""Architectures whose blocks have a head that is not read yet."""
NAMES = {
    MARKOV_EMBEDDING: "markov_head.markov_w1.weight",
    MARKOV_OUTPUT: "markov_head.markov_w2.weight",
    OWN_HEAD: "lm_head.weight",
}
"""Names of weights in a published folder that differ, by those here."""
KNOWN = (
    r"d2t|t2d|(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|layers\.\d+\.(input_layernorm|post_attention_layernorm|"
    r"self_attn\.[qkvo]_proj|self_attn\.[qk]_norm|mlp\.(gate|up|down)_proj)\.weight"
)
MARKOV = r"|markov_head\.markov_w[12]\.weight|confidence_head\..*"
"""Weights of a folder, and further ones of DSpark's: others would change what it computes."""
UNUSED = "confidence_head."
"""Prefix of weights that estimate whether tokens will be accepted."""
EMPTY_RANK = 8
"""Rank of the Markov head of zeros that a drafter without one is exported with: engines read none of rank 0."""


def is_published_block(config: PretrainedConfig) -> bool:
    """Whether a folder's config is of DFlash or a relative; such a folder looks like a small Qwen3."""
    architectures = config.architectures
    return isinstance(architectures, list) and any(each in (DFLASH, DSPARK, *OTHERS) for each in architectures)


def published_k(config: PretrainedConfig) -> int | None:
    """Most tokens of the drafts of a published folder; None for others, and if any number is."""
    if not is_published_block(config):
        return None
    layout = _layout(config.to_dict())
    return layout["k"] if type(layout["k"]) is int and layout["k"] > 0 and layout["causal"] is not True else None


def read_block(name: str, kind: str, config: PretrainedConfig) -> Head:
    """Reads a checkpoint that was trained here or published; raises ValueError as `read_head`.

    Args:
        name: a folder, or a Hugging Face id.
        kind: the drafter's name.
        config: the target's.
    """
    if is_head(name):
        return read_head(name, kind, config)
    with reading(name, kind):
        published = json.loads(file_of(name, CONFIG).read_bytes())
        entries = _entries(name, published)
        identity = TargetIdentity(
            hidden_size=published.get("hidden_size"),
            num_hidden_layers=published.get("num_target_layers", config.num_hidden_layers),
            vocab_size=published.get("vocab_size", config.vocab_size),
            weights=None,
        )
        identity.check(TargetIdentity.of(config, reads_weights=False), name)
        ours = {theirs: own for own, theirs in NAMES.items()}
        stored = load_file(file_of(name, WEIGHTS))
        known = KNOWN + (MARKOV if MARKOV_RANK in entries else "")
        if unknown := [key for key in stored if not re.fullmatch(known, key)]:
            raise ValueError(f"draft {name!r} has the weight {unknown[0]}, which its kind has not: use another")
        weights = {ours.get(key, key): weight for key, weight in stored.items() if not key.startswith(UNUSED)}
        return Head(config=entries, target=identity, weights=weights, name=name)


def _layout(published: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `BlockSettings` that say how a block looks; they are not checked."""
    own = published.get("dflash_config")
    own = own if isinstance(own, dict) else {}
    is_first = published.get("architectures") == [DSPARK] and published.get("sample_from_anchor", True)
    size, causal = published.get("block_size"), published.get("is_causal")
    return {
        "k": size - (not is_first) if type(size) is int else size,
        "causal": own.get("causal", False) if causal is None else causal,
        "anchor_first": is_first,
    }


def _entries(name: str, published: Any) -> dict[str, Any]:
    """The entries of `BlockSettings` in a published config, and that of a Markov head."""
    if not isinstance(published, dict):
        raise TypeError("its config.json is no config of a drafter")
    architectures, own = published.get("architectures"), published.get("dflash_config")
    for other in OTHERS:
        if architectures == [other]:
            raise ValueError(f"draft {name!r} is of {OTHERS[other]}, whose head is not read: use one of DFlash")
    is_dspark = architectures == [DSPARK]
    own = published if is_dspark and own is None else own
    if architectures != [DFLASH] and not is_dspark:
        raise ValueError(f"draft {name!r} has the architectures {architectures!r}: use one of {DFLASH} or {DSPARK}")
    if not isinstance(own, dict):
        raise ValueError(f"draft {name!r} has no dflash_config in its config.json: use another")
    if not is_dspark and (published.get("sample_from_anchor") or published.get(MARKOV_RANK)):
        raise ValueError(f"draft {name!r} is of DFlash and has entries of DSpark's in its config.json: use another")
    windows = (
        own.get("use_swa"),
        published.get("use_sliding_window"),
        "sliding_attention" in str(published.get("layer_types")),
    )
    if any(windows):
        raise ValueError(f"draft {name!r} has layers with a sliding window, which passes do not compute: use another")
    if published.get("attention_bias") or published.get("hidden_act", "silu") != "silu":
        raise ValueError(f"draft {name!r} has layers with biases or another activation than silu: use another")
    if (head := published.get("markov_head_type", "vanilla")) != "vanilla":
        raise ValueError(
            f"draft {name!r} has a Markov head of the type {head!r}, and only vanilla is read: use another"
        )
    layers = own.get("target_layer_ids")
    if not isinstance(layers, list) or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(f"draft {name!r}: target_layer_ids in its config.json is {layers!r}: use another")
    scaling = published.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {"rope_type": scaling or "default"}
    rope = published.get("rope_parameters") or scaling | {"rope_theta": published.get("rope_theta", 10000.0)}
    markov = {MARKOV_RANK: published.get(MARKOV_RANK)} if is_dspark else {}
    return {key: published.get(key) for key in SIZES} | markov | _layout(published) | {
        "model_type": "dflash",
        "rope_parameters": rope,
        "num_hidden_layers": published.get("num_hidden_layers"),
        "target_layers": [layer + 1 for layer in layers],  # its ids are of outputs, from 0 on
        "mask_token_id": own.get("mask_token_id"),
    }  # fmt: skip


def published_weights(head: Head) -> dict[str, Tensor]:
    """The weights of a drafter of ours by their published names, without the ids of its head."""
    weights = {NAMES.get(name, name): weight for name, weight in head.weights.items() if "." in name}
    if MARKOV_RANK not in head.config:
        ids = len(head.weights[D2T]) if D2T in head.weights else head.target.vocab_size
        weights[NAMES[MARKOV_EMBEDDING]] = torch.zeros(head.target.vocab_size, EMPTY_RANK, dtype=torch.bfloat16)
        weights[NAMES[MARKOV_OUTPUT]] = torch.zeros(ids, EMPTY_RANK, dtype=torch.bfloat16)
    return weights


def published_config(head: Head) -> dict[str, Any]:
    """The config of a drafter of ours, trained for a target, as DSpark's folders have it."""
    settings, target = BlockSettings.of(head), head.target
    own = {"mask_token_id": settings.mask_token_id, "target_layer_ids": [each - 1 for each in settings.target_layers]}
    ids = {"draft_vocab_size": len(head.weights[D2T])} if D2T in head.weights else {}
    return {
        "architectures": [DSPARK], "model_type": "qwen3", "dtype": "bfloat16",
        **{key: settings.sizes[key] for key in (*COUNTS, "rms_norm_eps", "rope_parameters")},
        "rope_theta": settings.sizes["rope_parameters"]["rope_theta"],
        "num_hidden_layers": settings.layers, "layer_types": ["full_attention"] * settings.layers,
        "num_target_layers": target.num_hidden_layers, "vocab_size": target.vocab_size, **ids,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "block_size": settings.k + settings.first, "sample_from_anchor": settings.anchor_first,
        "dspark_bonus_anchor": not settings.anchor_first, "is_causal": settings.causal,
        "markov_rank": head.config.get(MARKOV_RANK, EMPTY_RANK), "markov_head_type": "vanilla",
        "enable_confidence_head": False, "confidence_head_with_markov": False,
        **own, "dflash_config": own | {"causal": settings.causal},
    }  # fmt: skip


def write_published(folder: Path, head: Head) -> None:
    """Writes a drafter of ours as DSpark's folders are, into an existing folder; one with an output head other than the
    target's has it as `OWN_HEAD`."""
    ids = {D2T: head.weights[D2T]} if D2T in head.weights else {}
    weights = {name: weight.contiguous() for name, weight in published_weights(head).items()}
    save_file(weights | ids, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(published_config(head), indent=2) + "\n", encoding="utf-8")

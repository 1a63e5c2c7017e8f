"""Folders of block drafters as engines and other trainers have them: DFlash (Chen et al. 2026), DSpark (2607.05147),
DFlash 2.

Such a folder has a `config.json` of Qwen3 with one of these architectures, and names no weights of a target. A block of
DFlash is [anchor, mask, …], of which the masks draft, and all see each other; `dflash_config.causal` changes the
latter. In DSpark's the anchor drafts too, unless `sample_from_anchor` is false, and there is a Markov head. DFlash 2
has DFlash's block and a selector, and convolutions in its layers: of two tokens of a block, a product for each group of
channels. They are not computed here, so only folders are read where they leave all as it is, as in those written here.
"""

from __future__ import annotations

import itertools
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
from paradraft.formats.path_heads import (
    MARKOV_EMBEDDING,
    MARKOV_OUTPUT,
    MARKOV_RANK,
    SELECTED,
    SELECTOR_EMBEDDING,
    SELECTOR_OUTPUT,
    SELECTOR_RANK,
    SELECTOR_STATE,
)  # fmt: skip
from paradraft.formats.vocab_map import D2T

DFLASH, DSPARK, DFLASH_2 = ARCHITECTURES = "DFlashDraftModel", "Qwen3DSparkModel", "DFlash2DraftModel"
NAMES = {
    MARKOV_EMBEDDING: "markov_head.markov_w1.weight",
    MARKOV_OUTPUT: "markov_head.markov_w2.weight",
    SELECTOR_EMBEDDING: "candidate_selector.predecessor_codebook",
    SELECTOR_OUTPUT: "candidate_selector.successor_codebook",
    SELECTOR_STATE: "candidate_selector.hidden_projection.weight",
    OWN_HEAD: "lm_head.weight",
}
"""Names of weights in a published folder that differ, by those here."""
KNOWN = (
    r"d2t|t2d|(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|layers\.\d+\.(input_layernorm|post_attention_layernorm|"
    r"self_attn\.[qkvo]_proj|self_attn\.[qk]_norm|mlp\.(gate|up|down)_proj)\.weight"
)
FURTHER = {
    DFLASH: "",
    DSPARK: r"|markov_head\.markov_w[12]\.weight|confidence_head\..*",
    DFLASH_2: r"|candidate_selector\.((predecessor|successor)_codebook|hidden_projection\.weight)|layers\.\d+\."
    r"(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)",
}
"""Weights of a folder, and further ones of a kind: others would change what it computes."""
UNUSED = r"confidence_head\..*|layers\.\d+\.(attention|mlp)_conv\..*"
"""Weights that estimate whether tokens will be accepted, and convolutions that leave all as it is."""
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 16}
"""Sizes of DFlash 2's convolutions."""
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
"""Entries by which DFlash 2 changes embeddings or logits."""
FULL, SLIDING, WINDOW = "full_attention", "sliding_attention", "sliding_window"
EMPTY_RANK = 8
"""Rank of the Markov head of zeros that a drafter without one is exported with: engines read none of rank 0."""


def is_published_block(config: PretrainedConfig) -> bool:
    """Whether a folder's config is of DFlash or a relative; such a folder looks like a small Qwen3."""
    architectures = config.architectures
    return isinstance(architectures, list) and any(each in ARCHITECTURES for each in architectures)


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
        known = KNOWN + FURTHER[published["architectures"][0]]
        if unknown := [key for key in stored if not re.fullmatch(known, key)]:
            raise ValueError(f"draft {name!r} has the weight {unknown[0]}, which its kind has not: use another")
        if published["architectures"] == [DFLASH_2] and not _change_nothing(stored, entries):
            raise ValueError(
                f"draft {name!r} has convolutions in its layers, which passes do not compute: use one of DFlash or "
                "DSpark"
            )
        weights = {ours.get(key, key): weight for key, weight in stored.items() if not re.fullmatch(UNUSED, key)}
        return Head(config=entries, target=identity, weights=weights, name=name)


def _change_nothing(stored: Mapping[str, Tensor], entries: Mapping[str, Any]) -> bool:
    """Whether all convolutions are there, and leave all as it is."""
    found = {key: weight for key, weight in stored.items() if "_conv." in key}
    return len(found) == 4 * entries["num_hidden_layers"] and all(
        weight.shape == _shape(key, entries["hidden_size"]) and torch.equal(weight, _identity(key, weight))
        for key, weight in found.items()
    )


def _shape(convolution: str, width: int) -> tuple[int, ...]:
    """The shape of a weight of this name."""
    taps, group = CONVOLUTION.values()
    return (2, taps, width) if convolution.endswith("base_kernel") else (2 * taps * width // group, width)


def _identity(convolution: str, like: Tensor) -> Tensor:
    """The weight of this name, in the shape of another, that leaves all as it is: 1 for a token itself."""
    weight = torch.zeros_like(like)
    if convolution.endswith("base_kernel"):
        weight[:, 0] = 1
    return weight


def _layout(published: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `BlockSettings` that say how a block looks; they are not checked."""
    own = published.get("dflash_config")
    own = own if isinstance(own, dict) else {}
    is_first = published.get("architectures") == [DSPARK] and published.get("sample_from_anchor", True)
    size, causal = published.get("block_size"), published.get("is_causal")
    return {
        "k": size - (not is_first) if type(size) is int else size,
        "causal": own.get("causal", _sees_all(published)) if causal is None else causal,
        "anchor_first": is_first,
    }


def _has_windows(published: Mapping[str, Any]) -> bool:
    return bool(published.get("use_sliding_window")) or SLIDING in str(published.get("layer_types"))


def _sees_all(published: Mapping[str, Any]) -> bool:
    """Whether all layers have sliding windows, which are causal, over all positions."""
    types, window, room = (published.get(key) for key in ("layer_types", WINDOW, "max_position_embeddings"))
    is_every = isinstance(types, list) and bool(types) and all(each == SLIDING for each in types)
    return is_every and type(window) is type(room) is int and window >= room


def _entries(name: str, published: Any) -> dict[str, Any]:
    """The entries of `BlockSettings` in a published config, and that of a Markov head."""
    if not isinstance(published, dict):
        raise TypeError("its config.json is no config of a drafter")
    architectures, own = published.get("architectures"), published.get("dflash_config")
    is_dspark = architectures == [DSPARK]
    own = published if is_dspark and own is None else own
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise ValueError(
            f"draft {name!r} has the architectures {architectures!r}: use one of {', '.join(ARCHITECTURES)}"
        )
    if not isinstance(own, dict):
        raise ValueError(f"draft {name!r} has no dflash_config in its config.json: use another")
    if not is_dspark and (published.get("sample_from_anchor") or published.get(MARKOV_RANK)):
        raise ValueError(f"draft {name!r} is of DFlash and has entries of DSpark's in its config.json: use another")
    if own.get("use_swa") or (_has_windows(published) and not _sees_all(published)):
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
    ranks = {MARKOV_RANK: published.get(MARKOV_RANK)} if is_dspark else {}
    if architectures == [DFLASH_2]:
        ranks = {SELECTOR_RANK: own.get(SELECTOR_RANK)}
        if (few := own.get("selector_top_k")) != SELECTED:
            raise ValueError(
                f"draft {name!r} decides between {few!r} tokens, and only {SELECTED} are computed: use another"
            )
        if changed := [key for key in SCALES if own.get(key, published.get(key)) not in (None, 0, 1)]:
            raise ValueError(f"draft {name!r} scales its embeddings or logits ({changed[0]}): use another")
    return {key: published.get(key) for key in SIZES} | ranks | _layout(published) | {
        "model_type": "dflash",
        "rope_parameters": rope,
        "num_hidden_layers": published.get("num_hidden_layers"),
        "target_layers": [layer + 1 for layer in layers],  # its ids are of outputs, from 0 on
        "mask_token_id": own.get("mask_token_id"),
    }  # fmt: skip


def published_weights(head: Head, architecture: str) -> dict[str, Tensor]:
    """The weights of a drafter of ours by their published names, without the ids of its head."""
    weights = {NAMES.get(name, name): weight for name, weight in head.weights.items() if "." in name}
    vocabulary, ids = head.target.vocab_size, len(head.weights.get(D2T, range(head.target.vocab_size or 0)))
    if architecture == DFLASH_2:
        if D2T in head.weights:
            rows_UX = weights[NAMES[SELECTOR_OUTPUT]]
            all_VX = rows_UX.new_zeros(vocabulary, rows_UX.shape[1])
            all_VX[head.weights[D2T] + torch.arange(ids)] = rows_UX
            weights[NAMES[SELECTOR_OUTPUT]] = all_VX
        settings = BlockSettings.of(head)
        return weights | _identities(settings.layers, settings.width)
    if architecture == DSPARK and MARKOV_RANK not in head.config:
        weights[NAMES[MARKOV_EMBEDDING]] = torch.zeros(vocabulary, EMPTY_RANK, dtype=torch.bfloat16)
        weights[NAMES[MARKOV_OUTPUT]] = torch.zeros(ids, EMPTY_RANK, dtype=torch.bfloat16)
    return weights


def _identities(layers: int, width: int) -> dict[str, Tensor]:
    """Convolutions of all layers that leave all as it is, before attention or MLP and after it."""
    parts = ("attention_conv", "mlp_conv"), ("base_kernel", "kernel_projection.weight")
    names = [f"layers.{layer}.{part}.{weight}" for layer, part, weight in itertools.product(range(layers), *parts)]
    return {name: _identity(name, torch.empty(_shape(name, width), dtype=torch.bfloat16)) for name in names}


def published_config(head: Head, architecture: str, *, windows: bool) -> dict[str, Any]:
    """The config of a drafter of ours, trained for a target, see `write_published`."""
    settings, target = BlockSettings.of(head), head.target
    own: dict[str, Any] = {
        "mask_token_id": settings.mask_token_id,
        "target_layer_ids": [each - 1 for each in settings.target_layers],
    }
    ids = {"draft_vocab_size": len(head.weights[D2T])} if D2T in head.weights else {}
    common = {
        "architectures": [architecture], "model_type": "qwen3", "dtype": "bfloat16",
        **{key: settings.sizes[key] for key in (*COUNTS, "rms_norm_eps", "rope_parameters")},
        "rope_theta": settings.sizes["rope_parameters"]["rope_theta"],
        "num_hidden_layers": settings.layers, "layer_types": [FULL] * settings.layers,
        "num_target_layers": target.num_hidden_layers, "vocab_size": target.vocab_size, **ids,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "block_size": settings.k + settings.first, "is_causal": settings.causal,
    }  # fmt: skip
    if windows and settings.causal:
        whole = {WINDOW: settings.sizes["max_position_embeddings"]}
        common |= {"layer_types": [SLIDING] * settings.layers, "use_sliding_window": True} | whole
    if architecture == DFLASH:
        return common | {"dflash_config": own | {"causal": settings.causal}}
    if architecture == DFLASH_2:
        selector = {SELECTOR_RANK: head.config[SELECTOR_RANK], "selector_top_k": SELECTED} | CONVOLUTION
        return common | {"dflash_config": own | {"causal": settings.causal} | selector}
    return common | own | {
        "sample_from_anchor": settings.anchor_first, "dspark_bonus_anchor": not settings.anchor_first,
        "markov_rank": head.config.get(MARKOV_RANK, EMPTY_RANK), "markov_head_type": "vanilla",
        "enable_confidence_head": False, "confidence_head_with_markov": False,
        "dflash_config": own | {"causal": settings.causal},
    }  # fmt: skip


def write_published(folder: Path, head: Head, architecture: str, *, windows: bool = False) -> None:
    """Writes a drafter of ours into an existing folder; one with an output head other than the target's has it as
    `OWN_HEAD`.

    Args:
        architecture: one of `ARCHITECTURES`, with what the drafter has.
        windows: that causal layers have sliding windows over all positions, which are causal in SGLang; it has no other
            entry for that.
    """
    ids = {D2T: head.weights[D2T]} if D2T in head.weights else {}
    weights = {name: weight.contiguous() for name, weight in published_weights(head, architecture).items()}
    save_file(weights | ids, folder / WEIGHTS)
    (folder / CONFIG).write_text(
        json.dumps(published_config(head, architecture, windows=windows), indent=2) + "\n", encoding="utf-8"
    )

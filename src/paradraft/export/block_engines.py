"""Which block drafters engines read, and the commands that start them with one.

| engine | folder | blocks | heads | ids |
|---|---|---|---|---|
| vLLM | DSpark's; with a selector DFlash 2's | all | Markov, selector | some; with a selector all |
| llama.cpp | a file of the same kinds | all | Markov, selector | some |
| SGLang | DSpark's if the anchor drafts, else DFlash's, or 2's | all | Markov if the anchor drafts, selector | all |
| TensorRT-LLM | DFlash's | of masks that draft all, and see all of the block | none | all |

What they compute was read in their sources (vLLM: model_executor/models/qwen3_dflash.py, qwen3_dspark.py,
qwen3_dflash2.py; SGLang: srt/models/dflash.py, dspark.py, srt/speculative/dflash_utils.py; TensorRT-LLM:
_torch/models/modeling_dflash.py, _torch/speculative/dflash.py). All but llama.cpp need a GPU, and none of these has
tried a folder yet; llama.cpp's drafts were compared with ours (tests/e2e/test_llama_cpp_blocks.py).
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from paradraft.drafters.parts.draft_head import UP
from paradraft.export.engines import GGUF, SGLANG, TENSORRT, VLLM
from paradraft.formats.block import BlockSettings
from paradraft.formats.head import Head
from paradraft.formats.path_heads import MARKOV_RANK, PREVIOUS_TOKEN_RANK, SELECTED, SELECTOR_RANK
from paradraft.formats.published_block import CONVOLUTION, DFLASH, DFLASH_2, DSPARK
from paradraft.formats.vocab_map import D2T
from paradraft.sources.loading import load_skeleton
from paradraft.traits import INSTEAD

METHODS = {DFLASH: "dflash", DSPARK: "dspark", DFLASH_2: "dflash"}
"""The methods by the architecture of a folder, as vLLM names them; llama.cpp's names have "draft-" before them, and
SGLang's are in capitals."""
NAMES = {VLLM: "vLLM", GGUF: "llama.cpp", SGLANG: "SGLang", TENSORRT: "TensorRT-LLM"}
SCALES = ("embedding_multiplier", "logits_scaling", "logit_scale", "final_logit_softcapping")
"""Entries of a target's config that change its embeddings or logits."""


def architecture_for(head: Head, engine: str) -> str:
    """The architecture of the folder that a drafter of ours is written as."""
    if engine == TENSORRT:
        return DFLASH
    if SELECTOR_RANK in head.config:
        return DFLASH_2
    return DFLASH if engine == SGLANG and not head.config["anchor_first"] else DSPARK


def check_block(head: Head, k: int, engine: str) -> BlockSettings:
    """The settings of a drafter that an engine can serve; raises ValueError if it cannot draft k tokens with it."""
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
    for is_wrong, has, wants, instead in _conditions(head, settings, engine):
        if is_wrong:
            raise ValueError(f"{name!r} {has}, and {NAMES[engine]} {wants}: train it {instead}")
    return settings


def _conditions(head: Head, settings: BlockSettings, engine: str) -> list[tuple[bool, str, str, str]]:
    """For each reason why an engine does not read a drafter: whether it holds, what the drafter has, what the engine
    wants, and how to train one that it reads."""
    is_plain, width = engine == TENSORRT, settings.width
    has_selector, has_markov = SELECTOR_RANK in head.config, MARKOV_RANK in head.config
    other_head = f"with {MARKOV_RANK} in place of {SELECTOR_RANK}"
    group, least = CONVOLUTION["conv_group_size"], SELECTED * (SELECTED + 1)
    all_ids = is_plain or engine == SGLANG or (has_selector and engine == VLLM)
    return [
        (has_selector and is_plain, "has a selector", "reads none", f"without {SELECTOR_RANK}"),
        (has_markov and is_plain, "has a Markov head", "reads none", f"without {MARKOV_RANK}"),
        (
            has_markov and engine == SGLANG and not settings.anchor_first, "has a Markov head",
            "reads one where the anchor drafts", "with anchor_first=true",
        ),
        (
            settings.anchor_first and (is_plain or has_selector), "has an anchor that drafts",
            "reads blocks of which masks draft all tokens" + " with a selector" * has_selector,
            "with anchor_first=false",
        ),
        (settings.causal and is_plain, "has causal blocks", "lets masks see all of theirs", "with causal=false"),
        (
            has_selector and width % group != 0, f"has a selector and states of {width} numbers",
            f"wants a multiple of {group}", other_head,
        ),
        (
            has_selector and engine == GGUF and width < least, f"has a selector and states of {width} numbers",
            f"needs {least} for it", other_head,
        ),
        (
            all_ids and D2T in head.weights, "drafts some of the target's tokens",
            "drafts all" + (" with a selector" if engine == VLLM else ""),
            "without draft_vocab_size" + (f", or {other_head}" if engine == VLLM else ""),
        ),
        (
            UP in head.weights and engine in (SGLANG, TENSORRT), "has a smaller output head", "takes the target's",
            "without head_rank",
        ),
    ]  # fmt: skip


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


def launch_block(engine: str, architecture: str, target: str, draft: str, k: int, *, gguf: str) -> str:
    """The command that starts an engine.

    Args:
        architecture: of the folder, see `architecture_for`.
        gguf: name of the file for llama.cpp in the folder.
    """
    model, folder, method = shlex.quote(target), shlex.quote(draft), METHODS[architecture]
    if engine == VLLM:
        config = json.dumps({"method": method, "model": draft, "num_speculative_tokens": k})
        return f"vllm serve {model} --speculative-config {shlex.quote(config)}"
    if engine == SGLANG:
        # Otherwise it looks for a head that estimates what will be accepted.
        mode = "SGLANG_RAGGED_VERIFY_MODE=static " if architecture == DSPARK else ""
        return (
            f"{mode}python -m sglang.launch_server --model-path {model} --speculative-algorithm {method.upper()} "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {k + 1}"
        )
    assert engine == GGUF
    return (
        f"llama-server -m TARGET.gguf -md {shlex.quote(f'{draft}/{gguf}')} --spec-type draft-{method} "
        f"--spec-draft-n-max {k} --spec-draft-p-min 0"
    )


def tensorrt_block(settings: BlockSettings, draft: str, k: int) -> dict[str, Any]:
    """TensorRT-LLM's `speculative_config`."""
    return {
        "decoding_type": "DFlash", "max_draft_len": k, "speculative_model": draft,
        "mask_token_id": settings.mask_token_id, "target_layer_ids": [each - 1 for each in settings.target_layers],
    }  # fmt: skip

"""Exports drafters on the target's states to vLLM's checkpoint format, where vLLM computes the same function.

vLLM's computation was read in its source, and tried with 0.32 on a CPU: texts and acceptance counters equal ours.

- Medusa: its heads read the state after the final norm from which the last token was sampled, head i guesses the i-th
  token after it, and each is residual blocks and an output head, as here. A shared output head must be in the drafter's
  own folder (model_executor/models/medusa.py, v1/spec_decode/medusa.py).
- EAGLE: a drafter trained with `for_vllm` is vLLM's EagleMistralForCausalLM. A linear layer without a bias joins
  embedding and last state; Mistral layers and a final norm follow, whose output goes both to the target's output head
  and into the next step (mistral_eagle.py). The first token of a text is never read: tokens are shifted by one against
  states (v1/spec_decode/llm_base_proposer.py, `set_inputs_first_pass`).

Paradraft loads both formats too, so that an exported folder can be measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from paradraft.drafters import serving_of
from paradraft.drafters.parts.draft_head import UP
from paradraft.drafters.parts.draft_layers import mistral_like
from paradraft.formats.head import BODY, Head, write_head
from paradraft.formats.vocab_map import D2T
from paradraft.traits import INSTEAD

OUTPUT_HEAD = "lm_head.weight"
"""vLLM's name of the output head that all Medusa heads share."""
LAYERS = "model"
"""Config key under which vLLM looks for the config of an EAGLE head's layers."""
LAYERS_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "sliding_window", "tie_word_embeddings",
)  # fmt: skip
MEDUSA, EAGLE = "medusa", "eagle"
"""vLLM's names of its methods."""
ELSEWHERE = {
    "sglang": "SGLang has no Medusa, and no norms around the layer of its EAGLE",
    "tensorrt-llm": "TensorRT-LLM's PyTorch backend has EAGLE-3, and neither EAGLE nor Medusa",
    "transformers": "transformers has no drafters on a target's states",
    "gguf": "llama.cpp's files of such drafters are of other kinds",
}
"""Why other engines run none of these drafters."""


def check_head(head: Head, k: int) -> None:
    """Raises ValueError if vLLM cannot draft k tokens per round with a drafter on the target's states."""
    name, method = str(head.config["model_type"]), _method(head)
    if method == MEDUSA and k > (heads := head.setting("num_heads", int)):
        raise ValueError(f"k={k}: {head.name!r} has {heads} heads, so it drafts at most as many tokens")
    if method is not None and not {D2T, UP}.isdisjoint(head.weights):
        raise ValueError(
            f"{head.name!r} has an output head that vLLM does not read: train it without draft_vocab_size and head_rank"
        )
    if method is None or (method == EAGLE and head.config.get("for_vllm") is not True):
        why = serving_of(name).refusal or f"vLLM has no drafter {name!r}: {INSTEAD}"
        raise ValueError(f"{head.name!r} is of the kind {name}, and {why}")


def _method(head: Head) -> str | None:
    return serving_of(str(head.config["model_type"])).vllm


def is_exported(head: Head) -> bool:
    """Whether a checkpoint that `check_head` accepts has everything that vLLM reads."""
    return LAYERS in head.config if _method(head) == EAGLE else not needs_output_head(head)


def needs_output_head(head: Head) -> bool:
    """Whether vLLM would look for an output head that the checkpoint lacks."""
    return _method(head) == MEDUSA and head.setting("original_lm_head", bool) and OUTPUT_HEAD not in head.weights


def write_for_vllm(new: Path, head: Head, target: PretrainedConfig, output_head: Tensor | None) -> None:
    """Writes a checkpoint in vLLM's format; `output_head` is the target's, if the checkpoint `needs_output_head`."""
    if _method(head) == EAGLE:
        weights = {BODY + name: weight for name, weight in head.weights.items()}
        config = mistral_like(target, head.setting("num_hidden_layers", int)).to_dict()
        layers = {key: config[key] for key in LAYERS_KEYS} | {"architectures": ["EagleMistralForCausalLM"]}
        head = replace(head, config=head.config | {LAYERS: layers}, weights=weights)
    elif output_head is not None:
        head = replace(head, weights=head.weights | {OUTPUT_HEAD: output_head})
    write_head(new, head)

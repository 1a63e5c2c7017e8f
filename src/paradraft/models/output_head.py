"""From a causal LM's states after the final norm to its logits, as its own forward computes them.

Most models only multiply by the head's weights. Granite then divides by its config's `logits_scaling`, and Gemma may
squeeze logits (`final_logit_softcapping`); so no other code calls `lm_head` by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """The logits `[…, V]` of states `[…, D]`, those after the final norm."""
    return finished(model.lm_head(states), model.config)


def finished(products: Tensor, config: PretrainedConfig) -> Tensor:
    """The logits of what the head's weights make of states, `[…]` of any tokens.

    Args:
        products: states times weights.
        config: the model's.
    """
    if (scale := logits_scale(config)) != 1.0:
        products = products / scale
    if (cap := softcap(config)) is not None:
        products = torch.tanh(products / cap) * cap
    return products


def logits_scale(config: PretrainedConfig) -> float:
    """What a model divides its logits by."""
    return getattr(config, "logits_scaling", 1.0) if config.model_type == "granite" else 1.0


def softcap(config: PretrainedConfig) -> float | None:
    """The bound that a model keeps its logits within; None if it has none."""
    return getattr(config, "final_logit_softcapping", None) if config.model_type == "gemma3_text" else None

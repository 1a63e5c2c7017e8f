"""From a causal LM's states after the final norm to its logits, as its own forward computes them.

Most models only multiply by the head's weights. Granite then divides by its config's `logits_scaling`, and Gemma 3 may
squeeze logits (`final_logit_softcapping`); so no other code calls `lm_head` by itself.
"""

from __future__ import annotations

from typing import Any

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


@torch.no_grad()
def sizes_of(model: PreTrainedModel) -> tuple[float, float]:
    """Root mean squares of the numbers of a model's embeddings, and of those of its states after the final norm, as its
    own modules make them: Gemma's multiply embeddings, and add 1 to the weights of norms."""
    body: Any = model.model
    weight = body.embed_tokens.weight
    embeddings = body.embed_tokens(torch.arange(len(weight), device=weight.device))
    states = body.norm(torch.ones(1, weight.shape[1], dtype=weight.dtype, device=body.norm.weight.device))
    sizes = (float(each.float().square().mean().sqrt()) for each in (embeddings, states))
    return next(sizes), next(sizes)


def logits_scale(config: PretrainedConfig) -> float:
    """What a model divides its logits by."""
    return getattr(config, "logits_scaling", 1.0) if config.model_type == "granite" else 1.0


def check_linear(config: PretrainedConfig, setting: str) -> None:
    """Raises ValueError if a model's logits are not linear in its states, which a setting needs."""
    if (cap := softcap(config)) is not None:
        raise ValueError(f"{setting}: this model squeezes its logits (final_logit_softcapping={cap}): leave it out")


def softcap(config: PretrainedConfig) -> float | None:
    """The bound that a model keeps its logits within; None if it has none."""
    return getattr(config, "final_logit_softcapping", None) if config.model_type == "gemma3_text" else None

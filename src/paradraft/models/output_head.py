"""Output head: logits of the states after the final norm, as the model's own forward computes them.

Most models only multiply by the head's weights. Granite then divides by its config's `logits_scaling`, and Gemma 3 may
cap logits (`final_logit_softcapping`); so no other code calls `lm_head` itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.models.architectures import spec_of


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """The logits `[…, V]` of states `[…, D]` after the final norm."""
    return finished(model.lm_head(states), model.config)


def finished(products: Tensor, config: PretrainedConfig) -> Tensor:
    """The logits `[…]` of products of states and the head's weights: scaled and capped as the config says."""
    if (scale := logits_scale(config)) != 1.0:
        products = products / scale
    if (cap := softcap(config)) is not None:
        products = torch.tanh(products / cap) * cap
    return products


@torch.no_grad()
def sizes_of(model: PreTrainedModel) -> tuple[float, float]:
    """Root mean squares of a model's embeddings and of its states after the final norm.

    Computed by the model's own modules, because Gemma's scale embeddings and add 1 to the weights of norms.
    """
    body: Any = model.model
    weight = body.embed_tokens.weight
    embeddings = body.embed_tokens(torch.arange(len(weight), device=weight.device))
    states = body.norm(torch.ones(1, weight.shape[1], dtype=weight.dtype, device=body.norm.weight.device))
    sizes = (float(each.float().square().mean().sqrt()) for each in (embeddings, states))
    return next(sizes), next(sizes)


def logits_scale(config: PretrainedConfig) -> float:
    """The divisor of the logits (Granite); else 1."""
    setting = spec_of(config).logits_scale
    return 1.0 if setting is None else getattr(config, setting)


def check_linear(config: PretrainedConfig, setting: str) -> None:
    """Raises ValueError if a model caps its logits, because the setting needs logits that are linear in the states."""
    if (cap := softcap(config)) is not None:
        raise ValueError(f"{setting}: this model squeezes its logits (final_logit_softcapping={cap}): leave it out")


def softcap(config: PretrainedConfig) -> float | None:
    """The soft cap of the logits (Gemma 3); None without one."""
    setting = spec_of(config).softcap
    return None if setting is None else getattr(config, setting)

"""How much memory a training run takes, estimated before it begins.

Counted are weights, gradients and AdamW's two moments in float32 (Muon keeps one), what a pass
keeps for the backward pass, the dense attention mask where there is one, the logits that are in
memory at a time, and the teacher. A run may take a fifth more or less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from paradraft.train.attention import FLEX
from paradraft.train.pard import LOGITS
from paradraft.train.recipe import PardRecipe

COPIES_OF_LOGITS = 5
"""Logits, their log-probabilities, the teacher's, and the gradients of the two that have one."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that a run takes on one device.

    Args:
        weights: weights, gradients and optimizer.
        rows: what a pass over the rows keeps.
        mask: the attention mask.
        logits: logits and what the loss makes of them.
        teacher: the teacher's weights.
    """

    weights: float
    rows: float
    mask: float
    logits: float
    teacher: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.rows + self.mask + self.logits + self.teacher

    def check(self, device: torch.device) -> None:
        """Raises ValueError if the device has not so much memory."""
        free = _free_bytes(device)
        if self.total > free:
            parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in vars(self).items())
            raise ValueError(
                f"this recipe needs about {self.total / 2**30:.1f} GiB ({parts}), and {free / 2**30:.1f} GiB are free: "
                "lower samples_per_pass or max_length, or set gradient_checkpointing=true"
            )


def estimate(
    recipe: PardRecipe, model: PreTrainedModel, *, rows: int, passes: int, bf16: bool, teacher: PreTrainedModel | None
) -> Estimate:
    """Estimates a run.

    Args:
        recipe: the run.
        model: the drafter in training.
        rows: training rows of the largest sample.
        passes: samples, or packed groups of samples, of one pass.
        bf16: whether the pass computes in bf16.
        teacher: the teacher, if there is one.
    """
    config = model.config
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    size = 2 if bf16 else 4
    # Counted on Llama's and Qwen's layers: around both norms, in float32; queries and what attention gives; keys and
    # values; and the MLP.
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = (number * head_size for number in (config.num_attention_heads, config.num_key_value_heads))
    layer = 4 * 6 * config.hidden_size + size * (6 * queries + 8 * keys + 4 * config.intermediate_size)
    if recipe.gradient_checkpointing:
        kept = config.num_hidden_layers * 4 * config.hidden_size + layer
    else:
        kept = config.num_hidden_layers * layer
    is_dense = model.config._attn_implementation != FLEX
    return Estimate(
        weights=16.0 * trained + 4.0 * frozen,
        rows=float(passes) * rows * kept,
        mask=passes * float(rows) ** 2 * (1 + size) if is_dense else 0.0,
        logits=4.0 * COPIES_OF_LOGITS * min(passes * rows * config.vocab_size, LOGITS),
        teacher=float(sum(p.numel() * p.element_size() for p in teacher.parameters())) if teacher is not None else 0.0,
    )


def rows_of(tokens: int, recipe: PardRecipe) -> int:
    """Training rows of a sample of so many tokens.

    >>> rows_of(1025, PardRecipe(model="m", data=["d"], out="o", steps=1))
    3455
    """
    kept = [max(recipe.r**depth, recipe.r_min) for depth in range(1, recipe.k)]
    return math.ceil((tokens - 1) * (1 + sum(kept)))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)

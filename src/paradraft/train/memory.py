"""How much memory a training run takes beside the models that are loaded, estimated before it begins.

Counted are gradients and AdamW's two moments in float32 (Muon keeps one), what a pass keeps for the
backward pass, the attention mask, and the logits that are in memory at a time. A run may take a
fifth more or less; one whose weights are spread over devices takes less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from paradraft.models.kv_cache import head_size
from paradraft.train.attention import FLEX
from paradraft.train.pard import LOGITS
from paradraft.train.recipe import PardRecipe


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that a run takes on one device.

    Args:
        optimizer: gradients and moments.
        rows: what a pass over the rows keeps.
        mask: the attention mask, while it is made.
        logits: logits and what the loss makes of them.
    """

    optimizer: float
    rows: float
    mask: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.optimizer + self.rows + self.mask + self.logits

    def check(self, device: torch.device) -> None:
        """Raises ValueError if the device has not so much memory."""
        free = _free_bytes(device)
        if self.total > free:
            parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in vars(self).items())
            # Smaller passes do not help where gradients and moments alone are too large.
            fix = (
                "train adapters (lora), or a smaller model"
                if self.optimizer > free
                else "lower samples_per_pass or max_length, or set gradient_checkpointing=true"
            )
            raise ValueError(
                f"this recipe needs {self.total / 2**30:.1f} GiB beside its models ({parts}), and "
                f"{free / 2**30:.1f} GiB are free: {fix}"
            )


def estimate(
    recipe: PardRecipe, model: PreTrainedModel, *, rows: int, passes: int, bf16: bool, has_teacher: bool
) -> Estimate:
    """Estimates a run.

    Args:
        recipe: the run.
        model: the drafter in training.
        rows: training rows of the largest sample.
        passes: samples, or packed groups of samples, of one pass.
        bf16: whether the pass computes in bf16.
        has_teacher: whether a teacher's logits stand beside the drafter's.
    """
    config = model.config
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 2 if bf16 else 4
    # Counted on Llama's and Qwen's layers: around both norms, in float32; queries and what attention gives; keys and
    # values; and the MLP.
    heads = (config.num_attention_heads, config.num_key_value_heads)
    queries, keys = (number * head_size(config) for number in heads)
    layer = 4 * 6 * config.hidden_size + size * (6 * queries + 8 * keys + 4 * config.intermediate_size)
    if recipe.gradient_checkpointing:
        kept = config.num_hidden_layers * 4 * config.hidden_size + layer
    else:
        kept = config.num_hidden_layers * layer
    # A block mask is made from the dense one: booleans, ten times over while it is made.
    mask_size = 10 if model.config._attn_implementation == FLEX else 1 + size
    return Estimate(
        optimizer=12.0 * trained,
        rows=float(passes) * rows * kept,
        mask=passes * float(rows) ** 2 * mask_size,
        logits=4.0 * (5 if has_teacher else 3) * min(passes * rows * config.vocab_size, LOGITS),
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

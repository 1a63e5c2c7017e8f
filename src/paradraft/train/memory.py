"""How much memory a training run takes on its device, estimated before any weights are loaded.

Counted are the weights of all models, gradients and AdamW's two moments in float32 (Muon keeps one),
what a pass keeps for the backward pass, the attention mask, and the logits that are in memory at a
time. A run may take a fifth more or less; one whose weights are spread over devices takes less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.models.architecture import has_experts
from paradraft.models.devices import computes_bf16
from paradraft.models.kv_cache import free_bytes, head_size
from paradraft.sources.loading import load_skeleton, locate
from paradraft.train.objectives.objective import LOGITS
from paradraft.train.objectives.rows import FLEX
from paradraft.train.recipe import Recipe
from paradraft.train.trainee import RunData

NF4_BYTES = 0.52
"""Of a weight, with its share of the scales."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that a run takes on one device.

    Args:
        models: their weights.
        optimizer: gradients and moments.
        rows: what a pass over the rows keeps.
        mask: the attention mask, while it is made.
        logits: logits and what the loss makes of them.
    """

    models: float
    optimizer: float
    rows: float
    mask: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.models + self.optimizer + self.rows + self.mask + self.logits

    @property
    def in_words(self) -> str:
        """How much it is."""
        return f"about {self.total / 2**30:.1f} GiB of memory"

    def check(self, device: torch.device) -> None:
        """Raises ValueError if the device has not so much memory."""
        free = free_bytes(device)
        if self.total > free:
            parts = ", ".join(f"{name} {value / 2**30:.1f}" for name, value in vars(self).items())
            raise ValueError(
                f"this recipe needs {self.total / 2**30:.1f} GiB ({parts}), and {free / 2**30:.1f} GiB are free: "
                f"{self._fix(free)}"
            )

    def _fix(self, free: float) -> str:
        if self.models > free:
            return "use smaller models"
        if self.models + self.optimizer > free:  # then smaller passes do not help
            return "train adapters (lora) where the recipe has them, or a smaller model"
        return "lower samples_per_pass or max_length, or set gradient_checkpointing=true"


def estimate(
    recipe: Recipe,
    model: PreTrainedModel,
    *,
    weights: float,
    rows: int,
    passes: int,
    bf16: bool,
    is_taught: bool = False,
    beside: int = 0,
) -> Estimate:
    """Estimates a run that trains a causal LM.

    Args:
        recipe: the run.
        model: the drafter in training; its weights are not needed.
        weights: bytes of all models, from `weight_bytes`.
        rows: training rows of the largest sample.
        passes: samples, or packed groups of samples, of one pass.
        bf16: whether the pass computes in bf16.
        is_taught: whether a teacher's logits stand beside the drafter's.
        beside: parameters that are trained beside the model.
    """
    config = model.config
    trained = beside + sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 2 if bf16 else 4
    # A block mask is made from the dense one: booleans, ten times over while it is made. Without one the booleans are
    # made in blocks, and become numbers once for all layers.
    mask_size = 10 if model.config._attn_implementation == FLEX else 1 + size
    return estimate_rows(
        trained=trained,
        kept=kept_by_layers(recipe, config, bf16=bf16),
        mask=passes * float(rows) ** 2 * mask_size,
        vocab_size=config.vocab_size,
        weights=weights,
        rows=passes * rows,
        is_taught=is_taught,
    )


def kept_by_layers(recipe: Recipe, config: PretrainedConfig, *, bf16: bool) -> float:
    """Bytes that a row keeps for the backward pass in the layers of a causal LM."""
    size = 2 if bf16 else 4
    # Counted on the layers of Llama, Qwen, Gemma and mixtures of experts: around norms, in float32; queries and what
    # attention gives; keys and values; and the MLP.
    heads = (config.num_attention_heads, config.num_key_value_heads)
    queries, keys = (number * head_size(config) for number in heads)
    norms, mlp = (10 if config.model_type == "gemma3_text" else 6), size * 4 * config.intermediate_size
    if has_experts(config):  # of each that a token goes through; in float32, because grouped products are not cast
        expert = 4 * config.moe_intermediate_size + 3 * config.hidden_size
        mlp = max(mlp, 4 * config.num_experts_per_tok * expert)
    layer = 4 * norms * config.hidden_size + size * (6 * queries + 8 * keys) + mlp
    if recipe.gradient_checkpointing:
        return config.num_hidden_layers * 4.0 * config.hidden_size + layer
    return float(config.num_hidden_layers * layer)


def estimate_rows(
    *, trained: int, kept: float, mask: float, vocab_size: int, weights: float, rows: float, is_taught: bool
) -> Estimate:
    """Estimates a run that trains anything by rows.

    Args:
        trained: parameters in training.
        kept: bytes that a row keeps for the backward pass.
        mask: bytes of the attention mask, while it is made.
        vocab_size: rows of the output head.
        weights: bytes of all models, from `weight_bytes`.
        rows: training rows of the largest pass.
        is_taught: whether a teacher's logits stand beside the drafter's.
    """
    return Estimate(
        models=weights,
        optimizer=12.0 * trained,
        rows=rows * kept,
        mask=mask,
        logits=4.0 * (6 if is_taught else 3) * min(rows * vocab_size, LOGITS),
    )


def weight_bytes(recipe: Recipe, trained: int, data: RunData, *, frozen: Sequence[PreTrainedModel] = ()) -> float:
    """Bytes of the weights that a run loads: of what it trains in float32, and of the models that advise it; where it
    measures, of the target, and of the drafter once more, as it is measured.

    Args:
        recipe: the run.
        trained: parameters of the model in training.
        data: what else is known of the run.
        frozen: models that are read and not trained, such as a teacher; their weights are not needed.

    Raises:
        ValueError: the target does not exist, or is no supported causal LM.
    """
    weights = 4.0 * trained + (2 if data.bf16 else 4) * sum(map(parameters_of, frozen))
    if data.measures and recipe.measured_with is not None:
        target = load_skeleton(locate(recipe.measured_with, recipe.ROLES["target"]))
        weights += (2 if computes_bf16(data.device) else 4) * (parameters_of(target) + trained)
    return weights


def largest_pass(recipe: Recipe, data: RunData) -> tuple[int, int]:
    """How many samples, or packed groups of samples, the largest pass has, and tokens of the longest of them."""
    groups, longest = data.samples_per_pass, data.longest
    if recipe.pack:
        groups = min(groups, math.ceil(groups * longest / recipe.max_length) + 1)
        longest = recipe.max_length if groups < data.samples_per_pass else longest
    return groups, longest


def parameters_of(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def rows_of(tokens: int, *, k: int, r: float, r_min: float) -> int:
    """Training rows that COD keeps of a sample of so many tokens, as in `conditional_drop`.

    >>> rows_of(1025, k=8, r=0.7, r_min=0.2)
    3455
    """
    kept = [max(r**depth, r_min) for depth in range(1, k)]
    return math.ceil((tokens - 1) * (1 + sum(kept)))

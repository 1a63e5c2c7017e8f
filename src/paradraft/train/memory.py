"""Memory of a training run: an estimate before any weights are loaded, and its return to the system after evaluations.

The estimate counts the weights of all models, gradients and AdamW's two moments in float32 (Muon keeps one),
activations for the backward pass, the attention mask, and the logits that are in memory at a time. A run may take a
fifth more or less; one with sharded weights takes less. Evaluations and the copies that are saved come on top.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.models.architectures import head_size, spec_of
from paradraft.models.devices import computes_bf16
from paradraft.models.kv_cache import free_bytes
from paradraft.models.runtime import STORED, Runtime
from paradraft.sources.load_plan import Checkpoint, LoadPlan
from paradraft.sources.loading import load_skeleton, locate
from paradraft.sources.target_loading import weights_bytes
from paradraft.train.objectives.chunks import logits_at_once
from paradraft.train.objectives.rows import FLEX
from paradraft.train.recipe import Recipe
from paradraft.train.trainee import RunData

CPU = torch.device("cpu")
NF4_BYTES = 0.52
"""Bytes per weight, including its share of the scales."""
GIVE_BACK_EVERY = 10
"""Steps; doing so after each of them would take an eighth of the time."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes that a run takes on one device.

    Args:
        rows: activations that a pass keeps.
        mask: the attention mask, at its peak.
        logits: logits and the intermediate tensors of the loss.
    """

    models: float
    optimizer: float
    rows: float
    mask: float
    logits: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.models + self.optimizer + self.rows + self.mask + self.logits

    @property
    def in_words(self) -> str:
        """The total, for messages."""
        return f"about {self.total / 2**30:.1f} GiB of memory"

    def check(self, device: torch.device) -> None:
        """Raises ValueError if the device has too little memory."""
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
    device: torch.device = CPU,
    is_taught: bool = False,
    beside: int = 0,
) -> Estimate:
    """Estimates a run that trains a causal LM.

    Args:
        model: the drafter in training, or its skeleton.
        weights: bytes of all models, from `weight_bytes`.
        rows: training rows of the largest sample.
        passes: samples, or packed groups of samples, of one pass.
        is_taught: whether a teacher's logits are in memory too.
        beside: trained parameters that are not in `model`.
    """
    config = model.config
    trained = beside + sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 2 if bf16 else 4
    # A block mask is made from the dense one, with a peak of ten booleans per pair. A dense mask is made in blocks and
    # converted to floats once for all layers.
    mask_size = 10 if model.config._attn_implementation == FLEX else 1 + size
    return estimate_rows(
        trained=trained,
        kept=kept_by_layers(recipe, config, bf16=bf16),
        mask=passes * float(rows) ** 2 * mask_size,
        vocab_size=config.vocab_size,
        weights=weights,
        rows=passes * rows,
        device=device,
        is_taught=is_taught,
    )


def kept_by_layers(recipe: Recipe, config: PretrainedConfig, *, bf16: bool) -> float:
    """Activation bytes that a row keeps for the backward pass in the layers of a causal LM."""
    size = 2 if bf16 else 4
    # Counted on the layers of Llama, Qwen, Gemma and mixtures of experts: around norms, in float32; queries and
    # attention outputs; keys and values; and the MLP.
    heads = (config.num_attention_heads, config.num_key_value_heads)
    queries, keys = (count * head_size(config) for count in heads)
    norms, mlp = 2 + 2 * spec_of(config).norms, size * 4 * config.intermediate_size
    if spec_of(config).has_experts:  # of each active expert; in float32, because grouped products are not cast
        expert = 4 * config.moe_intermediate_size + 3 * config.hidden_size
        mlp = max(mlp, 4 * config.num_experts_per_tok * expert)
    layer = 4 * norms * config.hidden_size + size * (6 * queries + 8 * keys) + mlp
    if recipe.gradient_checkpointing:
        return config.num_hidden_layers * 4.0 * config.hidden_size + layer
    return float(config.num_hidden_layers * layer)


def estimate_rows(
    *,
    trained: int,
    kept: float,
    mask: float,
    vocab_size: int,
    weights: float,
    rows: float,
    device: torch.device,
    is_taught: bool,
) -> Estimate:
    """Estimates a run on training rows.

    Args:
        mask: peak bytes of the attention mask.
        vocab_size: rows of the output head.
        rows: training rows of the largest pass.
    """
    return Estimate(
        models=weights,
        optimizer=12.0 * trained,
        rows=rows * kept,
        mask=mask,
        logits=4.0 * (6 if is_taught else 3) * min(rows * vocab_size, logits_at_once(device)),
    )


def weight_bytes(recipe: Recipe, trained: int, data: RunData, *, frozen: float = 0.0) -> float:
    """Bytes of all weights of a run: of the trained parameters in float32 and of frozen models; if acceptance lengths
    are measured, also of the target and a second copy of the drafter.

    Args:
        trained: count of trained parameters.
        frozen: bytes of models that are not trained, such as a teacher, from `frozen_bytes`.

    Raises:
        ValueError: the target does not exist, or is no supported causal LM.
    """
    weights = 4.0 * trained + frozen
    if data.measures and recipe.measured_with is not None:
        bf16 = computes_bf16(data.device)
        target = frozen_bytes(locate(recipe.measured_with, recipe.ROLES["target"]), bf16=bf16)
        weights += target + (2 if bf16 else 4) * trained
    return weights


def frozen_bytes(folder: str, *, bf16: bool, as_numbers: bool = False) -> float:
    """Bytes of a model as it is loaded: with the bits that it is stored with, if these are few, or as numbers."""
    checkpoint = Checkpoint.at(folder)
    if as_numbers:
        return float((2 if bf16 else 4) * parameters_of(load_skeleton(folder)))
    dtype = STORED if checkpoint.is_quantized else "bfloat16" if bf16 else "float32"
    return weights_bytes(LoadPlan(checkpoint=checkpoint, runtime=Runtime(device="cpu", dtype=dtype)))


def largest_pass(recipe: Recipe, data: RunData) -> tuple[int, int]:
    """Samples, or packed groups of samples, in the largest pass, and tokens of the longest of them."""
    groups, longest = data.samples_per_pass, data.longest
    if recipe.pack:
        groups = min(groups, math.ceil(groups * longest / recipe.max_length) + 1)
        longest = recipe.max_length if groups < data.samples_per_pass else longest
    return groups, longest


def parameters_of(model: nn.Module) -> int:
    """Number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def rows_of(tokens: int, *, k: int, r: float, r_min: float) -> int:
    """Training rows that COD keeps of a sample, as in `conditional_drop`.

    >>> rows_of(1025, k=8, r=0.7, r_min=0.2)
    3455
    """
    kept = [max(r**depth, r_min) for depth in range(1, k)]
    return math.ceil((tokens - 1) * (1 + sum(kept)))


def give_back_after(steps: int) -> None:
    """Gives memory back after every tenth step. Passes differ in size, and what glibc keeps of them grew to 9 GB in 200
    steps where 3 GB were in use."""
    if steps % GIVE_BACK_EVERY == 0:
        give_back()


def give_back() -> None:
    """Returns memory to the system: of models, which refer to themselves, and what glibc keeps between blocks in use.

    Copies that are saved and measured take gigabytes, and would still be held beside the activations of the next step.
    """
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

"""LoRA (Hu et al. 2021): adapters of low rank learn in place of the weights, and so does the mask token's embedding."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from paradraft.train.recipe import Lora


def with_adapters(model: PreTrainedModel, lora: Lora, masks: list[int], *, seed: int) -> PeftModel:
    """Puts adapters into a model, in place; all else is frozen but the embeddings of the masks, which are new.

    Raises:
        ValueError: the model has no layers of these names.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        trainable_token_indices=masks or None,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            # peft still asks for the property by the name that `transformers` has given up.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            torch.manual_seed(seed)
            return cast(PeftModel, get_peft_model(model, config))
    except ValueError as error:
        raise ValueError(f"lora: {str(error).splitlines()[0]}") from None


def merged(adapted: PeftModel) -> PreTrainedModel:
    """The ordinary model that the adapters amount to."""
    return cast(PreTrainedModel, adapted.merge_and_unload())

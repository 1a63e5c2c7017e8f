"""Adaptation of a causal LM to a drafter: its mask token, and low-rank adapters in place of full training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.formats.pard import check_ends_nothing, declare_masks, declared_mask_id
from paradraft.text.tokenization import text_of
from paradraft.text.vocabulary import end_ids, free_id, resize, role_ids, set_to_mean, unsaid_id, used_rows

EMBEDDINGS = ("embed_tokens", "lm_head")
"""Names of the embedding and of the output head, which are one matrix in a tied model."""


class Lora(BaseModel):
    """Low-rank adapters in place of full training (Hu et al. 2021); merged into the weights at the end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1, description="of the adapters")
    alpha: int = Field(default=32, ge=1, description="their scale is alpha / rank")
    targets: str | list[str] = Field(default="all-linear", description="names of the layers that get one")


@contextmanager
def without_deprecations() -> Iterator[None]:
    """Hides that peft still uses a property name that `transformers` has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def with_adapters(model: PreTrainedModel, lora: Lora, masks: list[int], *, seed: int) -> PeftModel:
    """Adds adapters to a model, in place, and freezes all other weights except the embeddings of the masks.

    Raises:
        ValueError: the model has no layers of these names.
    """
    if model.config.tie_word_embeddings and any(name in lora.targets for name in EMBEDDINGS):
        raise ValueError(
            f"lora: the output head is the embedding here: leave {' and '.join(EMBEDDINGS)} out of targets"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        trainable_token_indices=masks or None,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(), without_deprecations():
            torch.manual_seed(seed)
            return cast(PeftModel, get_peft_model(model, config))
    except (ValueError, TypeError) as error:
        raise ValueError(f"lora: {str(error).splitlines()[0]}") from None


def add_mask_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_id: int | None = None, *, masks: int = 1
) -> int:
    """Chooses the mask token, sets its embedding to the mean of all others, and returns its id.

    By default one id serves all depths. A model that already has a mask token keeps it. Otherwise it is an id that no
    text uses (`free_id`), a special token that the model never learnt to output (`unsaid_id`), or an added row. The
    id is written into the model's config as `pard_token`, `mask_token_id` and `spd_type`, which engines read.

    Args:
        tokenizer: shows which rows are in use.
        masks: count of consecutive mask ids, one for each depth; the last serves all deeper ones. Only paradraft reads
            the count, `pard_masks` in the config.

    Raises:
        ValueError: `mask_id` is outside the embedding, or has a text, or ends texts; or there are too few free rows
            after the tokenizer's last id.
    """
    known = declared_mask_id(model.config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rows, used = len(embedding), used_rows(tokenizer)
    is_reduced = len(head) < rows  # `paradraft trim`; its rows were those of the embedding, if that was tied
    if mask_id is not None and not 0 <= mask_id < rows:
        raise ValueError(f"mask_token_id={mask_id} is outside the embedding of {rows} rows: use a free one of them")
    if mask_id is not None and (text := text_of(mask_id, tokenizer)) is not None:
        raise ValueError(f"mask_token_id={mask_id} is {text!r}, which could then not be said: use an id without a text")
    chosen = known if mask_id is None else mask_id
    if chosen is None:
        reserved = role_ids(model.config, model.generation_config)
        chosen = free_id(tokenizer, rows, reserved)
        if chosen is None:
            chosen = unsaid_id(tokenizer, embedding if is_reduced else head, reserved)
    if chosen is None and is_reduced:
        if not head.is_meta:
            raise ValueError("this trimmed draft has no untrained token for the mask: train it before it is trimmed")
        chosen = rows - 1  # a skeleton's rows are only counted
    if chosen is None:
        chosen = max(rows, used)
        resize(model, chosen + 1, used)
    if masks > 1 and not used <= chosen <= model.get_input_embeddings().weight.shape[0] - masks:
        raise ValueError(
            f"distinct_masks: {masks} ids from {chosen} on are not all free in the embedding: lower k or share one mask"
        )
    ends = {tokenizer.eos_token_id, *end_ids(model)}
    check_ends_nothing(range(chosen, chosen + masks), ends, tokenizer, model.name_or_path or "the model")
    if chosen != known:
        set_to_mean(model, slice(chosen, chosen + masks), used)
    declare_masks(model.config, chosen, masks)
    return int(chosen)

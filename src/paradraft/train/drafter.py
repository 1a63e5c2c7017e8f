"""The drafter as it is before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.drafters.pard import forget_masks
from paradraft.models.loading import load_model, load_skeleton, locate
from paradraft.models.runtime import Runtime
from paradraft.train.adapters import with_adapters
from paradraft.train.attention import FLEX
from paradraft.train.pard import add_mask_token
from paradraft.train.recipe import PardRecipe


@dataclass(frozen=True, kw_only=True)
class NewDrafter:
    """A drafter that has learnt nothing yet, in float32.

    Args:
        model: what is trained.
        adapted: the same with its adapters, if it has any.
        mask_id: its mask token; None for an ordinary draft.
    """

    model: PreTrainedModel
    adapted: PeftModel | None
    mask_id: int | None


def new_drafter(recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str) -> NewDrafter:
    """Loads a recipe's model and makes it ready to learn.

    Raises:
        ValueError: it cannot be loaded, or mask token or adapters do not fit it.
    """
    model = load_model(locate(recipe.model, "draft"), Runtime(device=device, dtype="float32"))
    return _ready(model, recipe, tokenizer, on_gpu=device.startswith("cuda"))


def drafter_skeleton(recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, device: str) -> PreTrainedModel:
    """What `new_drafter` would train, without its weights.

    Raises:
        ValueError: as `new_drafter`, but for what is wrong with the weights.
    """
    model = load_skeleton(locate(recipe.model, "draft"))
    return _ready(model, recipe, tokenizer, on_gpu=device.startswith("cuda")).model


def _ready(
    model: PreTrainedModel, recipe: PardRecipe, tokenizer: PreTrainedTokenizerBase, *, on_gpu: bool
) -> NewDrafter:
    if recipe.k > 1:
        mask_id = add_mask_token(model, tokenizer, recipe.mask_token_id, masks=recipe.masks)
    else:
        mask_id = None
        forget_masks(model.config)  # a PARD model that learns without masks is none any more
    masks = [] if mask_id is None else list(range(mask_id, mask_id + recipe.masks))
    adapted = None if recipe.lora is None else with_adapters(model, recipe.lora, masks, seed=recipe.seed)
    model.set_attn_implementation((FLEX if on_gpu else "sdpa") if recipe.attention == "auto" else recipe.attention)
    if recipe.gradient_checkpointing:
        # `transformers` renamed it in 5.23.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return NewDrafter(model=model, adapted=adapted, mask_id=mask_id)

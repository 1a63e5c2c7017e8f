"""The checkpoint of a PARD drafter: a causal LM whose `config.json` names its mask tokens.

`pard_token` and `mask_token_id` hold the same id, as vLLM and TensorRT-LLM read it; AMD's published drafters have
`pard_token` and `spd_type`.
"""

from __future__ import annotations

from collections.abc import Collection

from transformers import PretrainedConfig, PreTrainedTokenizerBase

RANK = "pard_previous_token_rank"
CONFIG_KEYS = ("pard_token", "mask_token_id", "spd_type", "pard_masks", RANK)
"""What the config of a PARD model has and that of an ordinary one has not; only paradraft reads the last two."""
TRAINED_LENGTH = "pard_max_length"
"""Most tokens of the rows that the model was trained on; beyond it a draft may be worse."""
PREVIOUS_TOKEN_HEAD = "previous_token_head/model.safetensors"
"""The file with the head of `paradraft.drafters.parts.previous_token`. Engines that do not know it load the folder as
any PARD model and draft without the head: they read all weights beside `config.json`, and none in folders below."""


def check_ends_nothing(
    masks: range, ends: Collection[int | None], tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises ValueError if a mask token ends texts: a mask is never chosen, so answers would not end.

    Args:
        masks: the mask tokens.
        ends: the tokens that end a text.
        tokenizer: knows how the tokens are called.
        name: of the model that has the mask tokens.
    """
    if found := [token for token in masks if token in ends]:
        raise ValueError(
            f"{name}: its mask token {found[0]} ({tokenizer.convert_ids_to_tokens(found[0])}) ends a text "
            "(eos_token_id), so answers would never end: train a drafter with another mask_token_id"
        )


def mask_token_id(model_config: PretrainedConfig, name: str) -> int:
    """The mask token that a PARD folder declares: `mask_token_id`, or `pard_token` as AMD's do.

    Raises:
        ValueError: there is none, or it is outside the embedding.
    """
    found = declared_mask_id(model_config)
    if found is None:
        raise ValueError(
            f"{name} names no mask token (pard_token in config.json): train one with `paradraft train pard`"
        )
    last = found + getattr(model_config, "pard_masks", 1) - 1
    if not 0 <= found <= last < model_config.vocab_size:
        outside = found if not 0 <= found < model_config.vocab_size else last
        raise ValueError(f"{name}: mask token {outside} is outside the embedding of {model_config.vocab_size} rows")
    return found


def declared_mask_id(model_config: PretrainedConfig) -> int | None:
    """What a model's config says is its mask token; None if it says nothing.

    Raises:
        ValueError: it says what is no token id.

    Example:
        >>> declared_mask_id(PretrainedConfig(pard_token=7)), declared_mask_id(PretrainedConfig())
        (7, None)
    """
    found = getattr(model_config, "mask_token_id", None)
    found = getattr(model_config, "pard_token", None) if found is None else found
    if found is not None and type(found) is not int:
        raise ValueError(f"{model_config.name_or_path}: the mask token in its config.json is {found!r}, not a token id")
    return found


def declare_masks(model_config: PretrainedConfig, mask_id: int, masks: int = 1) -> None:
    """Writes into a config what engines know a PARD model by.

    Args:
        model_config: changed in place.
        mask_id: the mask token.
        masks: how many ids from there on are masks.

    Example:
        >>> config = PretrainedConfig(pard_masks=3)
        >>> declare_masks(config, 7)
        >>> [getattr(config, key, None) for key in CONFIG_KEYS]
        [7, 7, 'pard', None, None]
    """
    forget_masks(model_config)
    model_config.pard_token = model_config.mask_token_id = mask_id
    model_config.spd_type = "pard"
    if masks > 1:
        model_config.pard_masks = masks


def forget_masks(model_config: PretrainedConfig) -> None:
    """Takes that out of a config, for a model that is none, or none any more."""
    for key in CONFIG_KEYS:
        if hasattr(model_config, key):
            delattr(model_config, key)

"""Checkpoint of a PARD drafter: a causal LM whose `config.json` names its mask tokens.

`pard_token` and `mask_token_id` hold the same id, because vLLM and TensorRT-LLM look for it there; AMD's published
drafters have `pard_token` and `spd_type`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from transformers import PretrainedConfig, PreTrainedTokenizerBase

RANK = "pard_previous_token_rank"
STATES_KEYS = ("pard2", "pard2_scale", "pard2_proj_bias", "pard2_target_dim", "pard2_target_layers")
"""Config keys of a PARD model that also reads the target's states, see `paradraft.formats.pard2`."""
CONFIG_KEYS = ("pard_token", "mask_token_id", "spd_type", "pard_masks", RANK, *STATES_KEYS)
"""Config keys of a PARD model that an ordinary model lacks; only paradraft reads `pard_masks` and the rank."""
TRAINED_LENGTH = "pard_max_length"
"""Config key: maximum length of the training rows in tokens; drafts beyond it may be worse."""
TRAINED_K = "pard_k"
"""Config key: number of tokens of a draft that were trained."""
PREVIOUS_TOKEN_HEAD = "previous_token_head/model.safetensors"
"""The file with the head of `paradraft.drafters.parts.path_heads.previous_token`. Other engines load the folder as any
PARD model and draft without the head: they read all weights next to `config.json`, and none in subfolders."""


def check_ends_nothing(
    masks: range, ends: Collection[int | None], tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Raises ValueError if a mask token is an end token: a mask is never sampled, so answers would not end."""
    if ending := [token for token in masks if token in ends]:
        raise ValueError(
            f"{name}: its mask token {ending[0]} ({tokenizer.convert_ids_to_tokens(ending[0])}) ends a text "
            "(eos_token_id), so answers would never end: train a drafter with another mask_token_id"
        )


def mask_token_id(model_config: PretrainedConfig, name: str) -> int:
    """The (first) mask token of a PARD model's config: `mask_token_id`, else `pard_token` as in AMD's.

    Raises:
        ValueError: there is none, or a mask token is outside the embedding.
    """
    first = declared_mask_id(model_config)
    if first is None:
        raise ValueError(
            f"{name} names no mask token (pard_token in config.json): train one with `paradraft train pard`"
        )
    last = first + getattr(model_config, "pard_masks", 1) - 1
    if not 0 <= first <= last < model_config.vocab_size:
        outside = first if not 0 <= first < model_config.vocab_size else last
        raise ValueError(f"{name}: mask token {outside} is outside the embedding of {model_config.vocab_size} rows")
    return first


def declared_mask_id(model_config: PretrainedConfig) -> int | None:
    """The mask token id in a model's config; None if there is none. Raises ValueError if it is no integer.

    Example:
        >>> declared_mask_id(PretrainedConfig(pard_token=7)), declared_mask_id(PretrainedConfig())
        (7, None)
    """
    token = getattr(model_config, "mask_token_id", None)
    token = getattr(model_config, "pard_token", None) if token is None else token
    if token is not None and type(token) is not int:
        raise ValueError(f"{model_config.name_or_path}: the mask token in its config.json is {token!r}, not a token id")
    return token


def declare_masks(model_config: PretrainedConfig, mask_id: int, masks: int = 1) -> None:
    """Writes the keys by which engines recognise a PARD model into a config.

    Args:
        model_config: changed in place.
        mask_id: the first mask token.
        masks: count of consecutive mask ids.

    Example:
        >>> config = PretrainedConfig(pard2=True)
        >>> declare_masks(config, 7, masks=3)
        >>> config.pard_token, config.mask_token_id, config.spd_type, config.pard_masks
        (7, 7, 'pard', 3)
    """
    forget_masks(model_config)
    model_config.pard_token = model_config.mask_token_id = mask_id
    model_config.spd_type = "pard"
    if masks > 1:
        model_config.pard_masks = masks


def forget_masks(model_config: PretrainedConfig) -> None:
    """Removes those keys from a config, in place, because its model is not (or no longer) a PARD model."""
    _forget(model_config, CONFIG_KEYS)


def forget_states(model_config: PretrainedConfig) -> None:
    """Makes the config of a PARD model, in place, one of a model that reads no states, as which it drafts too."""
    if hasattr(model_config, "pard2"):
        _forget(model_config, STATES_KEYS)
        model_config.spd_type = "pard"


def _forget(model_config: PretrainedConfig, keys: Iterable[str]) -> None:
    for key in keys:
        if hasattr(model_config, key):
            delattr(model_config, key)

"""Loads draft models that share the target's vocabulary."""

from __future__ import annotations

import warnings

from transformers import PretrainedConfig

from paradraft.errors import OtherTokensError
from paradraft.formats.gguf import is_gguf, read_gguf
from paradraft.formats.pard import check_ends_nothing, mask_token_id
from paradraft.models.architectures import context_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.names import is_shape
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, TargetFacts
from paradraft.sources.gguf_tokenizer import check_same_tokens
from paradraft.sources.load_plan import Checkpoint, draft_plan
from paradraft.sources.loading import load_tokenizer
from paradraft.sources.target_loading import load_lm
from paradraft.text.tokenization import text_of

_PROBE = "def f(x):\n    return 'Grüße, 世界' + str(x ** 2)  # 1234\n"

OR_TRANSLATE = "or --drafter translated"


def load_draft_lm(folder: str, target: Target | TargetFacts, runtime: Runtime, *, width: int = 0) -> CausalLM:
    """Loads a draft model; its passes are at least `width` tokens wide.

    Raises:
        ValueError: its tokens or its capacity do not fit the target's, or it cannot run like this.
    """
    draft = Checkpoint.at(folder)
    try:
        check_draft(draft, target)
    except OtherTokensError as error:
        raise ValueError(f"{error}, {OR_TRANSLATE}") from None
    return load_lm(draft_plan(draft, runtime, width=width, capacity=target.capacity), target.vocab_size)


def load_parallel_lm(folder: str, target: Target | TargetFacts, runtime: Runtime) -> tuple[CausalLM, range]:
    """Loads a PARD model, which never outputs a mask token.

    Warns if a mask token has a text, which answers then cannot contain.

    Returns:
        The model and its mask tokens.

    Raises:
        ValueError: the model does not fit the target, or its `config.json` names no mask token, or an end token.
    """
    lm = load_draft_lm(folder, target, runtime)
    first = mask_token_id(lm.model.config, folder)
    masks = range(first, first + getattr(lm.model.config, "pard_masks", 1))
    check_ends_nothing(masks, target.eos_ids, target.tokenizer, folder)
    for token in masks:
        if (text := text_of(token, target.tokenizer)) is not None:
            warnings.warn(
                f"{folder}: its mask token {token} is {text!r}, which answers can then not contain: train a "
                "drafter without mask_token_id",
                stacklevel=3,
            )
    lm.forbid(masks)
    return lm, masks


def check_draft(draft: Checkpoint, target: Target | TargetFacts) -> None:
    """Raises OtherTokensError or ValueError if a draft model's tokens or its capacity do not fit the target's."""
    check_draft_config(draft.folder, draft.config, vocab_size=target.vocab_size, capacity=target.capacity)
    check_draft_tokens(draft.folder, target)


def check_draft_tokens(folder: str, target: Target | TargetFacts) -> None:
    """Raises OtherTokensError if a draft model's tokens are not the target's."""
    if is_gguf(folder):  # its tokenizer's merges do not matter, and may not be known
        check_same_tokens(read_gguf(folder, vocabulary=True), target.tokenizer.get_vocab(), "the target")
    elif not is_shape(folder) and load_tokenizer(folder)(_PROBE)["input_ids"] != target.tokenizer(_PROBE)["input_ids"]:
        raise OtherTokensError(
            f"draft {folder!r} splits text into other tokens than the target: use one of the same family"
        )


def check_draft_config(folder: str, config: PretrainedConfig, *, vocab_size: int, capacity: int) -> None:
    """Raises OtherTokensError if a draft model's vocabulary, ValueError if its context is smaller than the target's."""
    if config.vocab_size < vocab_size:
        raise OtherTokensError(
            f"draft {folder!r} knows {config.vocab_size} tokens, the target {vocab_size}: use one of the same family"
        )
    if (room_for := context_of(config)) < capacity:
        raise ValueError(
            f"draft {folder!r} has room for {room_for} tokens, the target for {capacity}: set capacity={room_for}"
        )

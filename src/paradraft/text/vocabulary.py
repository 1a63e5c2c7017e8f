"""Embedding rows of a vocabulary: used and free ids, mask-token candidates, EOS ids, resizing."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_RESERVED = re.compile(r"reserved|unused|place.?holder", re.IGNORECASE)
_EQUAL = 0.01
"""Largest distance of equal rows, as a share of their norm: rounding to 8 bits makes .005. Trained special tokens are
at least .12 apart from all others in SmolLM2, and .33 in Qwen2.5-Coder."""


def used_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that a tokenizer needs: its largest id + 1, which `len` is not where ids are skipped."""
    return int(max(tokenizer.get_vocab().values())) + 1


def free_id(tokenizer: PreTrainedTokenizerBase, rows: int, taken: Collection[int] = ()) -> int | None:
    """An id below `rows` that occurs in no text, fit to be the mask token; None if every row is in use.

    First choice is the row after the tokenizer's last, then an id that it skips. Where there is neither, it is the last
    of the reserved special tokens, such as Llama 3's `<|reserved_special_token_247|>`, unless the chat template or the
    tokenizer gives it a role.

    Args:
        tokenizer: of the target.
        rows: of the embedding.
        taken: ids with a role that the tokenizer does not know, see `role_ids`.
    """
    used = set(tokenizer.get_vocab().values())
    end = used_rows(tokenizer)
    by_preference = [*range(end, rows), *range(min(end, rows) - 1, -1, -1)]
    reserved = [
        index
        for index in sorted(without_role(tokenizer, taken), reverse=True)
        if index < rows and _RESERVED.search(tokenizer.added_tokens_decoder[index].content)
    ]
    candidates = [index for index in by_preference if index not in used and index not in taken] + reserved
    return next(iter(candidates), None)


def without_role(tokenizer: PreTrainedTokenizerBase, taken: Collection[int] = ()) -> list[int]:
    """The special tokens, ascending, that neither the tokenizer nor its chat template gives a role, without `taken`."""
    roles = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    template = str(tokenizer.chat_template)
    return [
        index
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token.content not in roles and token.content not in template and index not in taken
    ]


def unsaid_id(tokenizer: PreTrainedTokenizerBase, head_VD: Tensor, taken: Collection[int] = ()) -> int | None:
    """The last untrained special token without a role, fit to be the mask token; None without such.

    Tokens that were in no training text end with one and the same row in the output head, because all of them are only
    ever pushed away from the hidden states. So an untrained token is recognized by a second special token with its row.
    In SmolLM2 these are 11 of 17, in Qwen2.5-Coder 11 of 20; `<filename>`, which SmolLM2 was trained with, is not among
    them.

    Args:
        tokenizer: of the model.
        head_VD: its output head; the result is None for a model without weights (meta device).
        taken: ids with a role that the tokenizer does not know, see `role_ids`.

    Source: Land and Bartolo 2024, "Fishing for Magikarp", section 3.1, which detects such tokens by their output rows.
    """
    rows = len(head_VD)
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special and index < rows]
    free = [index for index in without_role(tokenizer, taken) if index in special]
    if head_VD.is_meta or not free:
        return None
    # A quantized head returns rows only through `embedding`.
    rows_SD, rows_FD = (
        F.embedding(torch.tensor(ids, device=head_VD.device), head_VD.detach()).double() for ids in (special, free)
    )
    distances_FS = torch.cdist(rows_FD, rows_SD, compute_mode="donot_use_mm_for_euclid_dist")
    is_equal_FS = distances_FS <= _EQUAL * rows_FD.norm(dim=1, keepdim=True)
    unsaid = [index for index, equal in zip(free, is_equal_FS.sum(1).tolist(), strict=True) if equal > 1]  # 1: itself
    return max(unsaid, default=None)


def role_ids(*configs: PretrainedConfig | GenerationConfig) -> frozenset[int]:
    """All tokens that a model's configs give a role: BOS, EOS, padding, images.

    Example:
        >>> sorted(role_ids(GenerationConfig(eos_token_id=[0, 2], pad_token_id=5)))
        [0, 2, 5]
    """
    settings = [value for config in configs for key, value in config.to_dict().items() if key.endswith("_token_id")]
    return frozenset(
        index for ids in settings for index in (ids if isinstance(ids, list) else [ids]) if index is not None
    )


def check_rows(rows: int, largest: int, name: str) -> None:
    """Raises ValueError if the largest token id of the data has no row in a model's embedding."""
    if largest >= rows:
        raise ValueError(
            f"{name} has an embedding of {rows} rows, and the data holds token {largest}: use a model that knows all "
            "tokens of the tokenizer, or take the texts with that token out of the data"
        )


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """All EOS ids of a model's config and generation config."""
    return named_ends(model.config, model.generation_config)


def named_ends(*configs: PretrainedConfig | GenerationConfig) -> frozenset[int]:
    """All EOS ids of some configs."""
    settings = [config.eos_token_id for config in configs]
    return frozenset(index for ids in settings for index in ([ids] if isinstance(ids, int) else ids or []))


def of_one_family(ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether two vocabularies share at least half of the smaller one, and all shared tokens have the same ids.

    Example:
        >>> of_one_family({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "<think>": 2})
        True
        >>> of_one_family({"a": 0, "b": 1}, {"a": 1, "b": 0})
        False
    """
    shared = ours.keys() & theirs.keys()
    enough = 2 * len(shared) >= min(len(ours), len(theirs))
    return enough and all(ours[token] == theirs[token] for token in shared)


def set_to_mean(model: PreTrainedModel, index: int | slice, used: int) -> None:
    """Sets rows of the embedding, and of an untied output head that has all rows, to the mean of the first `used`."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for weight in {embedding, head} if len(head) == len(embedding) else {embedding}:
            weight[index] = weight[:used].mean(0)


def resize(model: PreTrainedModel, rows: int, used: int) -> None:
    """Resizes the embedding and the output head to `rows`, in place.

    The logit of an added row is the mean of those of the first `used`, so it is never the largest.
    """
    before = model.get_input_embeddings().weight.shape[0]
    if rows != before:
        model.resize_token_embeddings(rows, mean_resizing=False)
    if rows > before:
        set_to_mean(model, slice(before, rows), min(used, before))

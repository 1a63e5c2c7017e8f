"""The rows of an embedding: which of them a tokenizer uses, which are free, and how their number changes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_RESERVED = re.compile(r"reserved|unused|place.?holder", re.IGNORECASE)


def used_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows a tokenizer needs: one more than its largest id, which `len` is not where ids are skipped."""
    return int(max(tokenizer.get_vocab().values())) + 1


def free_id(tokenizer: PreTrainedTokenizerBase, rows: int, taken: Collection[int] = ()) -> int | None:
    """An id that no text is split into, fit to be the mask token.

    First choice is the row after the tokenizer's last, then an id that it skips. Where there is
    neither, it is the last of the special tokens that are kept for later use, such as Llama 3's
    `<|reserved_special_token_247|>`, unless the chat template or the tokenizer gives it a role.

    Args:
        tokenizer: whose texts are drafted.
        rows: rows of the embedding.
        taken: ids with a role that the tokenizer does not know, such as further end-of-text tokens.

    Returns:
        An id below `rows`; None where every row is in use.
    """
    names = set(tokenizer.get_vocab().values())
    behind = used_rows(tokenizer)
    unnamed = [*range(behind, rows), *range(min(behind, rows) - 1, -1, -1)]
    roles = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    template = str(tokenizer.chat_template)
    reserved = [
        index
        for index, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if index < rows
        and token.special
        and _RESERVED.search(token.content)
        and token.content not in roles
        and token.content not in template
    ]
    candidates = [index for index in unnamed if index not in names] + reserved
    return next((index for index in candidates if index not in taken), None)


def check_rows(rows: int, largest: int, name: str) -> None:
    """Raises ValueError if texts hold a token that a model has no row for.

    Args:
        rows: of the model's embedding.
        largest: token id of the texts.
        name: of the model.
    """
    if largest >= rows:
        raise ValueError(
            f"{name} has an embedding of {rows} rows, and the data holds token {largest}: use a model that knows all "
            "tokens of the tokenizer, or take the texts with that token out of the data"
        )


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """All tokens that end a text, by the model's config or its generation config."""
    return named_ends(model.config, model.generation_config)


def named_ends(*configs: PretrainedConfig | GenerationConfig) -> frozenset[int]:
    """All tokens that a model's configs call the end of a text."""
    found = [config.eos_token_id for config in configs]
    return frozenset(index for ids in found for index in ([ids] if isinstance(ids, int) else ids or []))


def of_one_family(ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether two vocabularies give the tokens that both know the same ids, and both know at least half of the smaller.

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
    """Makes rows of the embedding, and of an output head of its own, the mean of the first `used` rows."""
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight[index] = weight[:used].mean(0)


def resize(model: PreTrainedModel, rows: int, used: int) -> None:
    """Cuts or adds rows of the embedding at its end.

    The logit of an added row is the mean of those of the first `used`, so it is never the largest.

    Args:
        model: changed in place.
        rows: wanted rows.
        used: rows that hold tokens.
    """
    before = model.get_input_embeddings().weight.shape[0]
    if rows != before:
        model.resize_token_embeddings(rows, mean_resizing=False)
    if rows > before:
        set_to_mean(model, slice(before, rows), min(used, before))

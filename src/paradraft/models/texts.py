"""Token ids of texts, with one BOS in front where the tokenizer wants one, and no end behind.

A tokenizer may put a BOS before every text and an end-of-text behind it. Behind a prompt, or between a
prompt and its response, an end would say that nothing follows. And a text that a chat template wrote
begins with a BOS of its own.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def opening(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text that others follow: a prompt, or the beginning of a document."""
    # Of an empty text nothing tells what stands before it from what stands behind.
    around = tokenizer(text or "a", return_special_tokens_mask=True)
    is_around = around["special_tokens_mask"]
    before = around["input_ids"][: is_around.index(0)] if 0 in is_around else []
    tokens = continuation(text, tokenizer)
    return tokens if tokens[: len(before)] == before else before + tokens


def continuation(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text that stands behind others: nothing is put around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(token: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text of a token; None for a special token and for an id that the tokenizer does not have."""
    added = tokenizer.added_tokens_decoder.get(token)
    if tokenizer.convert_ids_to_tokens(token) is None or (added is not None and added.special):
        return None
    return str(tokenizer.decode([token]))

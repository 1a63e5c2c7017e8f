"""GGUF metadata of a tokenizer: tokens, merges, and llama.cpp's name of its pre-tokenizer.

Nothing in a tokenizer says that name, so each known name is tried: a tokenizer built from a file with that name must
give the same tokens for the texts in `PROBES`.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from paradraft.sources.gguf_tokenizer import CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED, built

PROBES = (
    "def f(x):\n    return 'Grüße' + str(x ** 2)  # 1234567, 89\n\n\n\tfor i in range(10): print(i, end=\"\")\n",
    "I'm sure they've said it'll do; WE'LL SEE, IT'S 'Twas. don't DON'T can't've",
    "  two spaces,   three\t\ttabs \n \n\n  and\r\nlines   \n   end   ",
    "x  1,  22   333    4\n  5\t6 and 3.14159 + 2e10 = 100000000000 (1,234,567.89) v2.0.1 ٣٤٥ ½",
    "naïve café, cafe\u0301, Ελληνικά, русский текст, עברית, हिन्दी, 中文字符,日本語のテキスト。한국어",
    "👍🏽 👨‍👩‍👧 🦙.cpp !!!??? ...... ------ ====== ///// /* comment */ <html></html> &amp; a/b\\c",
    "camelCase HTTPServer snake_case_name SCREAMING __init__ Xx XX xX",
)
"""Texts on which pre-tokenizers differ: contractions, digits after spaces, lines, marks, scripts, capitals."""


def metadata_of(tokenizer: PreTrainedTokenizerBase, rows: int, name: str) -> dict[str, Any]:
    """The GGUF metadata of a byte-level BPE tokenizer.

    Args:
        rows: of the embedding; ids after the last token are padded and marked as unused.

    Raises:
        ValueError: it is of another kind, or llama.cpp has no name for its pre-tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"{name!r} has a tokenizer that is no BPE of bytes, and others are not written to GGUF files")
    tokens, kinds = _tokens(tokenizer, rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
    }
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": _begins(tokenizer),
        **{f"tokenizer.ggml.{role}_token_id": token for role, token in ids.items() if token is not None},
    }
    if isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata | {"tokenizer.ggml.pre": split_of(tokenizer, metadata, name)}


def split_of(tokenizer: PreTrainedTokenizerBase, metadata: dict[str, Any], name: str) -> str:
    """The name of a tokenizer's pre-tokenizer: the first with which its GGUF `metadata` gives the same tokens.

    Raises:
        ValueError: no known name fits.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values()]
    texts = [*PROBES, " ".join(special[:20]), "".join(f"{token}\n a" for token in special[-20:])]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    for split in SPLITS:
        other = built(metadata | {"tokenizer.ggml.pre": split}, repr(name))
        if [other(text)["input_ids"] for text in texts] == expected:
            return split
    raise ValueError(
        f"{name!r} splits text in another way than {', '.join(SPLITS)} do, and llama.cpp has no name for it that is "
        "known here"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[list[str], list[int]]:
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens = [names.get(index, f"[PAD{index}]") for index in range(rows)]
    kinds = [NORMAL if index in names else UNUSED for index in range(rows)]
    for index, token in added.items():
        if index < rows:
            tokens[index], kinds[index] = token.content, CONTROL if token.special else USER_DEFINED
    return tokens, kinds


def _begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]

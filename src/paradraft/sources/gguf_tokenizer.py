"""Builds a `transformers` tokenizer from a GGUF file.

A file has the tokens, and merges or scores, but only a name for the pre-tokenizer. Each known name has the
pre-tokenizer of its family's `tokenizer.json`; other names are refused, because a text that is split differently is
another prompt. Two kinds: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM, Mistral Nemo), and SentencePiece's BPE (Llama
2, Mistral 7B), where a text after a special token begins with a space, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paradraft.errors import OtherTokensError
from paradraft.formats.gguf import GgufFile
from paradraft.text.vocabulary import of_one_family

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens (`tokenizer.ggml.token_type`)."""
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<EOT>", "</s>",
)  # fmt: skip
"""End tokens of any file in which they are special, as in llama.cpp: a file names one end, chat models have several."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_METASPACE = "▁"
_HOW_TO = "name the tokenizer of the model that it was made of: --tokenizer FOLDER_OR_ID"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Pre-tokenizer of a model family.

    Args:
        regex: of the pieces; None for that of GPT-2.
        digits: whether each digit is a separate piece.
        composed: whether text is normalised to NFC first.
        whole: whether merges are skipped for a piece that is a token.
        begins: whether texts begin with the BOS token by default.
    """

    regex: str | None = None
    digits: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


_LLAMA3 = Split(regex=rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}{_REST}", whole=True, begins=True)
_QWEN2 = Split(regex=rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{_REST}", composed=True)
SPLITS = {
    "gpt-2": Split(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": Split(regex=_QWEN2.regex),
    "smollm": Split(digits=True),
    "starcoder": Split(digits=True),
    "tekken": Split(regex=_TEKKEN, whole=True, begins=True),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file read with its vocabulary; raises ValueError if it has none or an unsupported one."""
    return built(file.metadata, repr(str(file.path)))


def check_same_tokens(file: GgufFile, others: Mapping[str, int], whose: str) -> None:
    """Raises OtherTokensError unless a file, read with its vocabulary, has the tokens of another.

    Pre-tokenizers may differ.
    """
    name = repr(str(file.path))
    tokens, _ = vocabulary_of(_fields(file.metadata), name)
    if not of_one_family(tokens, others):
        raise OtherTokensError(f"{name} has other tokens than {whose}: use one of the same family")


def _fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the tokenizer, by the names after "tokenizer.ggml."."""
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}


def built(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerBase:
    """Builds the tokenizer that a file's metadata, read with the vocabulary, describes.

    Raises:
        ValueError: it describes none, or an unsupported one.
    """
    fields = _fields(metadata)
    tokens, kinds = vocabulary_of(fields, name)
    model, pre = fields.get("model"), fields.get("pre")
    if model == "gpt2":
        if pre not in SPLITS:
            raise ValueError(
                f"{name} splits text as {pre!r} does, and only {', '.join(SPLITS)} are known here: {_HOW_TO}"
            )
        begins, tokenizer = SPLITS[pre].begins, _bpe_of_bytes(name, tokens, _merges(fields, name), SPLITS[pre])
    elif model == "llama":
        begins, tokenizer = True, _sentencepiece(tokens, fields, name)
    else:
        raise ValueError(f"{name} has a tokenizer of the kind {model!r}, which is not known here: {_HOW_TO}")
    for kind, is_special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, index in tokens.items()
            if kinds[index] == kind
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    special = {
        role: _named(tokens, fields, key)
        for role, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    if (bos := special["bos_token"]) is not None and fields.get("add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokens[bos])]
        )
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False, **{role: token for role, token in special.items() if token is not None},
    )  # fmt: skip


def vocabulary_of(fields: Mapping[str, Any], name: str) -> tuple[dict[str, int], list[int]]:
    """Ids of a file's tokens without padding tokens, and the kind of each id.

    Args:
        fields: metadata by the names after "tokenizer.ggml.".

    Raises:
        ValueError: it has no tokens, or lists of different lengths.
    """
    tokens, kinds = fields.get("tokens"), fields.get("token_type")
    if not isinstance(tokens, list) or not tokens or any(type(token) is not str for token in tokens):
        raise ValueError(f"{name} has no tokenizer: {_HOW_TO}")
    kinds = [NORMAL] * len(tokens) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(f"{name} has {len(tokens)} tokens and the kinds of another number: it is damaged")
    # Older files do not mark padding tokens as unused.
    is_used = [kind != UNUSED and tokens[index] != f"[PAD{index}]" for index, kind in enumerate(kinds)]
    return {token: index for index, token in enumerate(tokens) if is_used[index]}, kinds


def named_ends_of(file: GgufFile) -> set[int]:
    """The end tokens that a file names; a base model's file does not name an end of turn."""
    fields = _fields(file.metadata)
    return {fields[key] for key in END_KEYS if type(fields.get(key)) is int}


def end_ids_of(file: GgufFile) -> list[int]:
    """The end tokens: those that a file names, and those of `ENDS` that are special in its vocabulary."""
    fields, ends = _fields(file.metadata), named_ends_of(file)
    if "tokens" in fields:
        tokens, kinds = vocabulary_of(fields, repr(str(file.path)))
        ends |= {tokens[token] for token in ENDS if token in tokens and kinds[tokens[token]] == CONTROL}
    return sorted(ends)


def _merges(fields: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    stored, merges = fields.get("merges", []), list[tuple[str, str]]()
    for merge in stored if isinstance(stored, list) else [None]:
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and space and right):
            raise ValueError(f"{name} has a merge that is no pair of tokens: it is damaged")
        merges.append((left, right))
    return merges


def _named(tokens: Mapping[str, int], fields: Mapping[str, Any], key: str) -> str | None:
    """The token whose id is the value of a key, if there is one."""
    token_id = fields.get(key)
    return next((token for token, index in tokens.items() if type(token_id) is int and index == token_id), None)


def _with_model(name: str, tokens: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(tokens, merges, **settings))
    except Exception as error:  # `tokenizers` has no class of its errors
        raise ValueError(f"{name} has a vocabulary that is damaged ({str(error).splitlines()[0]})") from None


def _bpe_of_bytes(name: str, tokens: dict[str, int], merges: list[tuple[str, str]], split: Split) -> Tokenizer:
    tokenizer = _with_model(name, tokens, merges, ignore_merges=split.whole)
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None)]
    if split.regex is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    if split.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: dict[str, int], fields: Mapping[str, Any], name: str) -> Tokenizer:
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) <= max(tokens.values(), default=0):
        raise ValueError(f"{name} has tokens without scores: {_HOW_TO}")
    unknown = _named(tokens, fields, "unknown_token_id")
    tokenizer = _with_model(
        name, tokens, merges_of(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    has_prefix = fields.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _METASPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_METASPACE), spaces] if has_prefix else [spaces])
    steps = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def merges_of(tokens: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, best first: all pairs of tokens that form a token.

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "abb": 3, "bb": 4}, [0, 0, -1, -3, -2])
    [('a', 'b'), ('b', 'b'), ('ab', 'b'), ('a', 'bb')]
    """
    scored: list[tuple[float, int, int, str, str]] = []
    for token, index in tokens.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in tokens and right in tokens:
                scored.append((-scores[index], -len(left), -len(right), left, right))
    return [(left, right) for *_, left, right in sorted(scored, key=lambda merge: merge[:3])]

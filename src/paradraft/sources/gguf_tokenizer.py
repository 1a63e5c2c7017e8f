"""The tokenizer that a GGUF file describes, as one of `transformers`.

A file has the tokens, and merges or scores, but of how text is split before only a name. For each name that is known
here the split is that of the `tokenizer.json` files of its family; others are refused, since a text that is split
otherwise is another prompt. Two kinds: BPE of bytes (GPT-2, Llama 3, Qwen, SmolLM, Mistral Nemo), and SentencePiece's
BPE (Llama 2, Mistral 7B), where a text after a special token begins with a space, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paradraft.formats.gguf import GgufFile
from paradraft.text.vocabulary import of_one_family

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What kinds of tokens there are (`tokenizer.ggml.token_type`)."""
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<EOT>", "</s>",
)  # fmt: skip
"""Tokens that end a text wherever they are special, as in llama.cpp: a file names one end, chat models have several."""
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
    """How a family splits text before it looks for tokens.

    Args:
        regex: of the pieces; None for that of GPT-2.
        digits: whether each digit is a piece of its own.
        composed: whether characters are composed first (NFC).
        whole: whether a piece that is a token is not looked at further.
        begins: whether texts begin with the BOS token where a file says nothing.
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
"""By the name that stands in a file (`tokenizer.ggml.pre`)."""


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file that was read with its vocabulary.

    Raises:
        ValueError: it has none, or one of another kind.
    """
    return built(file.metadata, repr(str(file.path)))


def check_same_tokens(file: GgufFile, others: Mapping[str, int], whose: str) -> None:
    """Checks that a file's tokens are those of another model or tokenizer, however both split text.

    Args:
        file: read with its vocabulary.
        others: the other tokens with their ids.
        whose: they are, for the message.

    Raises:
        ValueError: it has none, or others.
    """
    name = repr(str(file.path))
    tokens, _ = vocabulary_of(_told(file.metadata), name)
    if not of_one_family(tokens, others):
        raise ValueError(f"{name} has other tokens than {whose}: use one of the same family")


def _told(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of its tokens, by the names after "tokenizer.ggml."."""
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}


def built(metadata: Mapping[str, Any], name: str) -> PreTrainedTokenizerBase:
    """The tokenizer that a file's metadata describes.

    Args:
        metadata: with the vocabulary.
        name: of the file, for messages.

    Raises:
        ValueError: it describes none, or one of another kind.
    """
    told = _told(metadata)
    tokens, kinds = vocabulary_of(told, name)
    model, pre = told.get("model"), told.get("pre")
    if model == "gpt2":
        if pre not in SPLITS:
            raise ValueError(
                f"{name} splits text as {pre!r} does, and only {', '.join(SPLITS)} are known here: {_HOW_TO}"
            )
        begins, tokenizer = SPLITS[pre].begins, _bpe_of_bytes(name, tokens, _merges(told, name), SPLITS[pre])
    elif model == "llama":
        begins, tokenizer = True, _sentencepiece(tokens, told, name)
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
        role: _named(tokens, told, key)
        for role, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
    }
    if (bos := special["bos_token"]) is not None and told.get("add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokens[bos])]
        )
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False, **{role: token for role, token in special.items() if token is not None},
    )  # fmt: skip


def vocabulary_of(told: Mapping[str, Any], name: str) -> tuple[dict[str, int], list[int]]:
    """The tokens of a file with their ids, those that only fill it up left out; and the kind of each id.

    Args:
        told: its metadata, by the names after "tokenizer.ggml.".
        name: of the file, for messages.

    Raises:
        ValueError: it has none, or its lists do not fit each other.
    """
    tokens, kinds = told.get("tokens"), told.get("token_type")
    if not isinstance(tokens, list) or not tokens or any(type(token) is not str for token in tokens):
        raise ValueError(f"{name} has no tokenizer: {_HOW_TO}")
    kinds = [NORMAL] * len(tokens) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(f"{name} has {len(tokens)} tokens and the kinds of another number: it is damaged")
    # Older files give other kinds to tokens that only fill the vocabulary up.
    is_used = [kind != UNUSED and tokens[index] != f"[PAD{index}]" for index, kind in enumerate(kinds)]
    return {token: index for index, token in enumerate(tokens) if is_used[index]}, kinds


def named_ends_of(file: GgufFile) -> set[int]:
    """The tokens that a file names as the end of a text; base models are those that do not name the end of a turn."""
    told = _told(file.metadata)
    return {told[key] for key in END_KEYS if type(told.get(key)) is int}


def end_ids_of(file: GgufFile) -> list[int]:
    """The tokens that end a text: those that a file names, and those of `ENDS` that are special in it.

    Args:
        file: read with its vocabulary.
    """
    told, found = _told(file.metadata), named_ends_of(file)
    if "tokens" in told:
        tokens, kinds = vocabulary_of(told, repr(str(file.path)))
        found |= {tokens[token] for token in ENDS if token in tokens and kinds[tokens[token]] == CONTROL}
    return sorted(found)


def _merges(told: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    found, merges = told.get("merges", []), list[tuple[str, str]]()
    for merge in found if isinstance(found, list) else [None]:
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and space and right):
            raise ValueError(f"{name} has a merge that is no pair of tokens: it is damaged")
        merges.append((left, right))
    return merges


def _named(tokens: Mapping[str, int], told: Mapping[str, Any], key: str) -> str | None:
    """The token whose id a file gives by a key, if there is one."""
    wanted = told.get(key)
    return next((token for token, index in tokens.items() if type(wanted) is int and index == wanted), None)


def _with_model(name: str, tokens: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(tokens, merges, **settings))
    except Exception as error:  # of `tokenizers`, which has no class for it
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


def _sentencepiece(tokens: dict[str, int], told: Mapping[str, Any], name: str) -> Tokenizer:
    scores = told.get("scores")
    if not isinstance(scores, list) or len(scores) <= max(tokens.values(), default=0):
        raise ValueError(f"{name} has tokens without scores: {_HOW_TO}")
    unknown = _named(tokens, told, "unknown_token_id")
    tokenizer = _with_model(
        name, tokens, merges_of(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    has_prefix = told.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _METASPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_METASPACE), spaces] if has_prefix else [spaces])
    steps = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def merges_of(tokens: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, the best first: all pairs of tokens that make a token.

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "abb": 3, "bb": 4}, [0, 0, -1, -3, -2])
    [('a', 'b'), ('b', 'b'), ('ab', 'b'), ('a', 'bb')]
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in tokens.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in tokens and right in tokens:
                found.append((-scores[index], -len(left), -len(right), left, right))
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:3])]

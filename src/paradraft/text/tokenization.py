"""Tokenization of prompts and continuations, and incremental detokenization of an answer.

A tokenizer may put a BOS before every text, an EOS after it, and a space before its first word. After a prompt, or
between a prompt and its response, none of these belongs there: an EOS says that nothing follows. And a text that a
chat template wrote begins with the template's BOS.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
"""The replacement character, which tokenizers write for invalid bytes."""
_MARKS_A_SPACE = ("▁", "Ġ")
"""Marks of a space at the beginning of a token."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte token, in tokenizers with byte fallback."""
_MOST_BYTES = 4
"""Of a character in UTF-8."""


def encode_prompt(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt or of the beginning of a document: with a BOS if the tokenizer adds one, without an EOS."""
    # Of an empty text nothing tells the special tokens before it from those after it.
    encoding = tokenizer(text or "a", return_special_tokens_mask=True)
    is_special = encoding["special_tokens_mask"]
    before = encoding["input_ids"][: is_special.index(0)] if 0 in is_special else []
    tokens = _token_ids(text, tokenizer)
    return tokens if tokens[: len(before)] == before else before + tokens


def encode_continuation(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text after another: without special tokens, and without a space that the tokenizer adds."""
    return continuation_encoder(tokenizer)(text)


def continuation_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """`encode_continuation` for many texts."""
    word = tokenizer.convert_ids_to_tokens(_token_ids("a", tokenizer)[:1])
    if not (word and word[0].startswith(_MARKS_A_SPACE)):
        return partial(_token_ids, tokenizer=tokenizer)
    line = _token_ids("\n", tokenizer)

    def encode(text: str) -> list[int]:
        # Such a tokenizer puts a space before the first word of every text. So the text follows a line break, which
        # takes the space; then the line break is cut off.
        both = _token_ids("\n" + text, tokenizer) if text else []
        is_split = text and both[: len(line)] == line and tokenizer.unk_token_id not in line
        return both[len(line) :] if is_split else _token_ids(text, tokenizer)

    return encode


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(token: int, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text of a token; None for special tokens and unknown ids."""
    added = tokenizer.added_tokens_decoder.get(token)
    if tokenizer.convert_ids_to_tokens(token) is None or (added is not None and added.special):
        return None
    return str(tokenizer.decode([token]))


def exact_text(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of tokens with that of special ones, as they are; the same for a tokenizer however it is stored."""
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class GrowingText(Protocol):
    """Incremental detokenization. Special tokens have no text."""

    def add(self, token: int) -> str:
        """Takes in a token; returns the new text that no later token can change."""

    @property
    def rest(self) -> str:
        """The text that a later token may still change; without the bytes of an incomplete character."""

    def end(self) -> str:
        """Returns `rest` as final: later tokens do not change it."""


class Detokenizer:
    """Decodes answers token by token.

    The text of an answer is that of prompt and answer decoded together, without the text of the prompt: decoded alone,
    the answer may lack the space before its first word. Special tokens and an incomplete character at the end (bytes
    that no token has completed) are left out, and spaces are not cleaned up. Every token is decoded once or twice,
    however long the answer is.

    Attributes:
        special: ids of the special tokens by their texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {str(added[token].content): token for token in added if added[token].special}
        self._special_ids = frozenset(self.special.values())
        self._bytes: dict[int, bytes] = {}
        self._is_byte_level = _is_byte_level(tokenizer)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    def after(self, prompt: Sequence[int]) -> GrowingText:
        """The text of an answer to a prompt, empty at first."""
        if self._is_byte_level:
            return _Bytes(self._bytes_of, prompt)
        return _Pieces(self._decode, self._bytes_of, self._is_silent, prompt)

    def _is_silent(self, token: int) -> bool:
        """Whether a token has no text: a special token or an unknown id."""
        return token in self._special_ids or self._tokenizer.convert_ids_to_tokens(token) is None

    def _bytes_of(self, token: int) -> bytes:
        """The bytes of a token; empty if its text is not made of bytes."""
        content = self._bytes.get(token)
        if content is None:
            content = self._bytes[token] = self._find_bytes(token)
        return content

    def _find_bytes(self, token: int) -> bytes:
        if self._is_silent(token):
            return b""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if not self._is_byte_level:
            byte = _BYTE.fullmatch(piece)
            # A tokenizer may have such a token and decode it literally.
            return bytes([int(byte[1], 16)]) if byte and self._decode([token]) != piece else b""
        try:
            return bytes(self._byte_of[character] for character in piece)
        except KeyError:
            return piece.encode()  # an added token is written as text

    def _decode(self, tokens: list[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text is the bytes of its tokens, concatenated and otherwise unchanged."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    kinds = [step["type"] for step in state.get("decoders", [state])]
    return "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}


def _new_bytes() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class _Bytes:
    """Text of a byte-level tokenizer: the bytes of an incomplete character wait for the rest."""

    def __init__(self, bytes_of: Callable[[int], bytes], prompt: Sequence[int]) -> None:
        self._bytes_of = bytes_of
        self._decoder = _new_bytes()
        # The prompt may end within a character, which the answer then completes.
        self._decoder.decode(_last_bytes(map(bytes_of, reversed(prompt))))
        if not _is_begun(self._decoder.getstate()[0]):
            self._decoder.reset()

    def add(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    @property
    def rest(self) -> str:
        pending = self._decoder.getstate()[0]
        return "" if _is_begun(pending) else pending.decode(errors="replace")

    def end(self) -> str:
        text = self.rest
        self._decoder.reset()
        return text


def _is_begun(pending: bytes) -> bool:
    """Whether pending bytes begin a character. Python's decoder also keeps those of a surrogate, which begin none.

    >>> _is_begun(bytes([0xED, 0x9F])), _is_begun(bytes([0xED, 0xA0]))
    (True, False)
    """
    return not (len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0)


def _last_bytes(parts: Iterable[bytes]) -> bytes:
    """The end of the bytes of `parts`, which are in reverse order: enough for an incomplete character."""
    last = b""
    for part in parts:
        last = part + last
        if len(last) >= _MOST_BYTES:
            break
    return last


class _Pieces:
    """Text of any other tokenizer: new tokens are decoded after the last token that has a text, in place of all before.

    A run of byte tokens waits for its end, because decoders write a whole run as replacement characters if a later byte
    makes it invalid.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        bytes_of: Callable[[int], bytes],
        is_silent: Callable[[int], bool],
        prompt: Sequence[int],
    ) -> None:
        self._decode = decode
        self._bytes_of = bytes_of
        self._is_silent = is_silent
        self._waiting: list[int] = []
        before = [token for token in prompt if not is_silent(token)]
        whole = len(before) - self._half(before)
        self._settle(before[:whole])
        # The prompt may end within a character, which the answer then completes.
        self._waiting = before[whole:]

    def add(self, token: int) -> str:
        if self._is_silent(token):
            return ""
        self._waiting.append(token)
        if self._bytes_of(token) or (text := self.rest).endswith(REPLACEMENT):
            return ""
        self._settle(self._before + self._waiting)
        return text

    @property
    def rest(self) -> str:
        whole = self._waiting[: len(self._waiting) - self._half(self._waiting)]
        return self._decode(self._before + whole)[self._shown :] if whole else ""

    def end(self) -> str:
        text = self.rest
        self._settle(self._before + self._waiting)
        return text

    def _settle(self, tokens: list[int]) -> None:
        """Makes the text of these tokens final."""
        self._waiting = []
        # Without the byte tokens at the end, which would be one run with those that follow.
        run = len(list(self._run(tokens)))
        for self._before in _suffixes(tokens[: len(tokens) - run]):
            if text := self._decode(self._before):
                break
        else:
            self._before, text = tokens, self._decode(tokens)
        self._shown = len(text)

    def _run(self, tokens: list[int]) -> Iterator[bytes]:
        """The bytes of the byte tokens at the end, the last first."""
        for token in reversed(tokens):
            if not (byte := self._bytes_of(token)):
                return
            yield byte

    def _half(self, tokens: list[int]) -> int:
        """The number of tokens at the end that are bytes of an incomplete character."""
        decoder = _new_bytes()
        decoder.decode(_last_bytes(self._run(tokens)))
        pending = decoder.getstate()[0]
        return len(pending) if _is_begun(pending) else 0


def _suffixes(tokens: list[int]) -> Iterator[list[int]]:
    """Ends of a list, each twice as long as the previous; the last is the whole list.

    >>> list(_suffixes([1, 2, 3, 4, 5]))
    [[5], [4, 5], [2, 3, 4, 5], [1, 2, 3, 4, 5]]
    """
    size = 1
    while size < 2 * len(tokens):
        yield tokens[-size:]
        size *= 2

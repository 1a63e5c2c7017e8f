"""A constant text whose continuations are drafted: its places are sorted by the tokens before them.

REST (He, Zhong, Cai, Lee & He 2024, "REST: Retrieval-Based Speculative Decoding", arXiv 2311.08252) looks the
longest suffix of a text up in a suffix array. Here places are sorted by the tokens before them, the last one first. So
the places that match the end of a text over m tokens are neighbours, and those that match over m + 1 are neighbours
among these: each token of the text narrows the interval by bisection.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.models.target import Target, TargetFacts
from paradraft.sources.records import Record, conversation_of, records
from paradraft.text.chat_template import ChatTemplate, text_message
from paradraft.text.tokenization import encode_continuation
from paradraft.tree import ABSENT

MOST_BYTES = 2**27
"""Largest file."""
PIECE = 2**18
"""Characters of a text that are tokenized at a time, up to the end of the line: a whole text might take gigabytes."""
ANSWERS = ("response", "completion", "answer")
"""Keys of a record's answer, of which the first is read."""
FIX = 'name a text file in UTF-8, or JSONL of {"text": …}, {"answer": …}, {"completion": …} or {"messages": […]}'


class Corpus:
    """Tokens of texts, and their places sorted by the tokens before each.

    Args:
        texts: the tokens of each text. No match and no continuation spans two.
        depth: longest match, in tokens.

    >>> corpus = Corpus([[1, 2, 3, 9], [5, 2, 3, 4]], depth=8)
    >>> [(corpus.tokens[place], length) for place, length in corpus.matches([1, 2, 3], places=8)]
    [(9, 3), (4, 2)]
    """

    def __init__(self, texts: Iterable[Sequence[int]], *, depth: int) -> None:
        joined = array("i", [ABSENT])
        for text in texts:
            joined.extend(text)
            joined.append(ABSENT)
        self.depth = depth
        self.tokens: Sequence[int] = joined
        """The tokens of all texts, with `ABSENT` before, between and after them."""
        self._places = array("i", _sorted_places(np.frombuffer(joined, np.int32), depth).tobytes())

    def __len__(self) -> int:
        """The number of places."""
        return len(self._places)

    def matches(self, text: Sequence[int], *, places: int) -> list[tuple[int, int]]:
        """The places that match the end of a text longest, the longest match first, and over how many tokens.

        Where more places match over the same length than there is room for, they are taken evenly from their order.

        Args:
            places: most of them.
        """
        tokens, spans = self.tokens, [(0, len(self._places))]
        for length, token in enumerate(text[: -self.depth - 1 : -1], start=1):

            def before(place: int, length: int = length) -> int:
                return tokens[place - length]

            low = bisect_left(self._places, token, *spans[-1], key=before)
            high = bisect_right(self._places, token, low, spans[-1][1], key=before)
            if low == high:
                break
            spans.append((low, high))
        found: list[tuple[int, int]] = []
        first = last = spans[-1][0]  # of the places that match longer
        for length in range(len(spans) - 1, 0, -1):
            low, high = spans[length]
            count, shorter = high - low - (last - first), first - low
            taken = min(count, places - len(found))
            for index in range(taken):
                nth = index * count // taken
                found.append((self._places[low + nth if nth < shorter else last + nth - shorter], length))
            if len(found) == places:
                break
            first, last = low, high
        return found


def _sorted_places(tokens: np.ndarray[Any, np.dtype[np.int32]], depth: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The places between two tokens of a text, sorted by at least `depth` tokens before each, the last one first.

    Places are ranked by 1, 2, 4, … tokens: the rank by twice as many is that of a pair, the place's rank and the rank
    of the place before these tokens (Manber & Myers 1993). The first places have none before; any rank will do, because
    the first token is `ABSENT`, at which matches end.

    >>> _sorted_places(np.array([-1, 2, 1, 2, 2, -1], np.int32), 2).tolist()
    [3, 2, 4]
    """
    _, ranks = np.unique(tokens, return_inverse=True)
    size = 1
    while size < depth and int(ranks.max()) + 1 < len(tokens):
        pairs = ranks * len(tokens)
        pairs[size:] += ranks[:-size]
        _, ranks = np.unique(pairs, return_inverse=True)
        size *= 2
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    is_place = np.zeros(len(tokens), bool)
    is_place[:-1] = (tokens[:-1] != ABSENT) & (tokens[1:] != ABSENT)
    return order[is_place[order]] + np.int32(1)


def check_corpus(name: str) -> None:
    """Raises ValueError if a corpus is no file, is empty or is too large."""
    if not os.path.isfile(name):
        problem = "is a folder" if os.path.isdir(name) else "is no file" if os.path.exists(name) else "does not exist"
        raise ValueError(f"corpus={name!r} {problem}: {FIX}")
    if not 0 < (size := os.path.getsize(name)) <= MOST_BYTES:
        problem = f"has {size / 2**20:.0f} MiB" if size else "is empty"
        raise ValueError(f"corpus={name!r} {problem}: {FIX}, of at most {MOST_BYTES // 2**20} MiB")


def read_corpus(name: str, target: Target | TargetFacts, *, depth: int) -> Corpus:
    """Reads and tokenizes a corpus: a text, or a table of records.

    Args:
        name: of the file, as of `paradraft.sources.records.records`. Records have texts, answers or conversations.
        target: in whose tokens it is read; ids that the target never chooses end a text.
        depth: longest match, in tokens.

    Raises:
        ValueError: the file is no text, a record has none of these, or no text has 2 tokens.
    """
    check_corpus(name)
    try:
        each = (_tokens_of(record, place, target.tokenizer) for place, record in records(Path(name), "corpus"))
        corpus = Corpus(
            ([t if t < target.vocab_size else ABSENT for t in text] for text in chain.from_iterable(each)), depth=depth
        )
    except OSError as error:
        raise ValueError(f"corpus={name!r} cannot be read ({error.strerror}): {FIX}") from None
    except ValueError as error:
        raise ValueError(f"{error}: {FIX}") from None
    if not len(corpus):
        raise ValueError(f"corpus={name!r} has no text of 2 tokens, so nothing follows any: {FIX}")
    return corpus


def _tokens_of(record: Record, place: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The tokens of each text of a record."""
    answer = next((record[key] for key in ANSWERS if isinstance(record.get(key), str)), None)
    if isinstance(text := record.get("text", answer), str):
        if "\0" in text:
            raise ValueError(f"{place}: contains NUL characters, so it is no text")
        yield [token for piece in _pieces(text) for token in encode_continuation(piece, tokenizer)]
    elif (messages := conversation_of(record)) is None:
        raise ValueError(f"{place}: the record has no text")
    else:
        yield from _conversation(messages, place, tokenizer)


def _conversation(messages: list[Any], place: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The tokens that a chat model reads; without a chat template, those of each message."""
    try:
        talk = [text_message(message, number) for number, message in enumerate(messages, start=1)]
        if tokenizer.chat_template:
            yield ChatTemplate(tokenizer=tokenizer).tokens(talk, ask=False)
        else:
            yield from (encode_continuation(message["content"], tokenizer) for message in talk)
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        raise ValueError(f"{place}: {error}") from None


def _pieces(text: str) -> Iterator[str]:
    """Splits a text at ends of lines.

    >>> [len(piece) for piece in _pieces("x" * PIECE + "yy\\n" + "z")]
    [262147, 1]
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end

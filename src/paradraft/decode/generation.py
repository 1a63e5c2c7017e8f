"""The growing answer of a request: tokens, text, stop strings and end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paradraft.core import INVALID, Request
from paradraft.decode.logprobs import TokenLogprobs
from paradraft.decode.stats import Stats
from paradraft.errors import one_line
from paradraft.text.tokenization import REPLACEMENT, GrowingText

NOT_NUMBERS = (
    "the {model}'s largest logit is NaN or infinite: its weights are damaged, its dtype overflows (try bfloat16 or "
    "float32), or a processor forbids every token"
)
_FIRST_MARK = 0xD800
"""The first of 2048 characters that no text contains (UTF-16 surrogates)."""


class Generation:
    """The growing answer of a request: its tokens, its text, and its end.

    An answer ends at an end-of-sequence token, at a stop string or at its length limit, whichever comes first, also
    inside an accepted run. Tokens after the end are cut: neither emitted nor counted.

    Args:
        text: an empty text, ended by its stop strings: the token that completes one is emitted, the text ends before
            it. None for an answer whose text is not needed while it grows.
    """

    def __init__(self, request: Request, text: AnswerText | None = None) -> None:
        self.request = request
        self.tokens: list[int] = []
        """The new tokens."""
        self.accepted: list[int] = []
        """By round, the number of accepted tokens."""
        self.drafted: list[int] = []
        """By round, the number of drafted tokens, side branches included."""
        self.depths: list[int] = []
        """By round, the depth of the draft."""
        self.logprobs: list[TokenLogprobs] = []
        """Of the tokens, for a request with `logprobs`."""
        self.round_ends: list[int] = []
        """By round, the length of `tokens` after it."""
        self.arrived_s = time.perf_counter()
        """Arrival time of the request."""
        self.delivered_s: list[float] = []
        """By round, seconds from the arrival of the request to the delivery of its tokens."""
        self.stats: list[Stats] = []
        """Counts and times, of each batch that the request has left."""
        self.told_rounds = 0
        """Rounds published to the reader, which may be another thread; always whole rounds."""
        self.is_told = False
        """Whether the end is published to the reader."""
        self.pieces: list[str] = []
        """The text that each token adds, with `text`; text held back until the end comes with the last token."""
        self.finish_reason: str | None = None
        """"eos", "stop" or "length"; "error" with `error`; None while the answer grows."""
        self.error: Exception | None = None
        self.is_watched = False
        """Whether the answer is streamed round by round."""
        self.is_cancelled = False
        """Set to true to remove the request from the batch before its next round."""
        self._text = text

    @property
    def room(self) -> int:
        """Most tokens that the answer may still get."""
        return 0 if self.is_finished else self.request.max_new_tokens - len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    @property
    def is_over(self) -> bool:
        """Whether it needs no further round: it has ended or was cancelled."""
        return self.is_finished or self.is_cancelled

    @property
    def so_far(self) -> Request:
        """The request for the rest of the answer; with the match rule the resumed answer has the same tokens."""
        if not self.tokens:
            return self.request
        answered = self.request.answered + len(self.tokens)
        return replace(self.request, tokens=self.request.tokens + self.tokens, answered=answered)

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error."""
        self.error, self.finish_reason = error, "error"

    @property
    def draftable(self) -> int:
        """Most tokens to draft: one less than `room`, because the target adds a token after them."""
        room = max(self.room - 1, 0)
        return room if self.request.k is None else min(room, self.request.k)

    def emit(
        self,
        committed: list[int],
        accepted: int,
        drafted: int = 0,
        depth: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[int]:
        """Appends the tokens of a round.

        Args:
            committed: the accepted tokens, then the target's own; `INVALID` where none could be chosen.

        Returns:
            The tokens that belong to the answer; none if it had ended before, or if it fails.
        """
        if self.is_finished:
            return []
        new, reason = committed[: self.room], None
        is_valid = INVALID not in new
        new = new if is_valid else new[: new.index(INVALID)]
        end = next((index + 1 for index, token in enumerate(new) if token in self.request.eos_ids), None)
        if end is not None:
            new, reason = new[:end], "eos"
        pieces: list[str] = []
        if self._text is not None:
            for token in new:
                pieces.append(self._text.add(token))
                if self._text.has_stop:
                    break
            if self._text.has_stop:
                new, reason = new[: len(pieces)], "stop"
        if not is_valid and reason is None:
            self.fail(ValueError(NOT_NUMBERS.format(model="target")))
            return []
        self.tokens += new
        self.accepted.append(min(accepted, len(new)))
        self.drafted.append(drafted)
        self.depths.append(depth)
        self.logprobs += logprobs[: len(new)]
        self.round_ends.append(len(self.tokens))
        # The tokens are on the host, so the GPU's work is done.
        self.delivered_s.append(time.perf_counter() - self.arrived_s)
        if reason is None and len(self.tokens) == self.request.max_new_tokens:
            reason = "length"
        if reason is not None and self._text is not None:
            pieces[-1] += self._text.end()
        self.pieces += pieces
        self.finish_reason = reason
        return new


@dataclass(frozen=True, kw_only=True)
class StopStrings:
    """Stop strings in the form in which they are searched for.

    A special token has no text in an answer. If a stop string names one, then in the searched text and in the pattern
    the token is replaced by a character that no text contains.

    Args:
        patterns: to search for.
        marks: special token id to the character that replaces it.
    """

    patterns: tuple[str, ...] = ()
    marks: Mapping[int, str]

    def shown(self, text: str) -> str:
        """Removes the marks of special tokens from a part of the searched text."""
        return text.translate({ord(mark): None for mark in self.marks.values()})


def stop_strings(stop: str | Sequence[str] | None, special: Mapping[str, int]) -> StopStrings:
    """Checks and compiles the stop strings of a request.

    Args:
        special: special token texts of the tokenizer, with their ids.

    Raises:
        ValueError: `stop` has another type, or a stop string is empty or contains half a character.

    >>> stops = stop_strings(["END", "\\n<|im_end|>"], {"<|im_end|>": 7, "<|im_start|>": 6})
    >>> stops.patterns, stops.marks
    (('END', '\\n<|im_end|>', '\\n\\ud800'), {7: '\\ud800'})
    """
    stop = () if stop is None else stop
    if not isinstance(stop, (str, list, tuple)):
        raise ValueError(f"stop={one_line(stop)}: use a string, or a list of strings; leave it out for none")
    strings = [stop] if isinstance(stop, str) else list(stop)
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"stop: {one_line(string)} is no string: use a string, or a list of strings")
        if not string:
            raise ValueError("a stop string is empty: give at least one character")
        if REPLACEMENT in string or any(0xD800 <= ord(character) <= 0xDFFF for character in string):
            raise ValueError(
                f"the stop string {string!a} contains half a character (U+FFFD stands for one): leave it out"
            )
    # Longer names first, because one may contain another.
    named = sorted((text for text in special if any(text in string for string in strings)), key=len, reverse=True)
    marks = {text: chr(_FIRST_MARK + index) for index, text in enumerate(named)}
    marked = list(strings)
    for text, mark in marks.items():
        marked = [string.replace(text, mark) for string in marked]
    # The model may also spell the text of a special token with ordinary tokens.
    patterns = tuple(dict.fromkeys([*strings, *marked]))
    return StopStrings(patterns=patterns, marks={special[text]: mark for text, mark in marks.items()})


class AnswerText:
    """The text of a growing answer, up to the first stop string.

    It depends on the sequence of tokens alone, so a stream and a result have the same text with any drafter. A stop
    string ends the answer as soon as the text, if it ended there, would contain it.
    """

    def __init__(self, text: GrowingText, stop: StopStrings) -> None:
        self.has_stop = False
        """Whether a stop string is complete; no token may be added then."""
        self._text = text
        self._stop = stop
        self._held = ""

    def add(self, token: int) -> str:
        """Adds a token; returns the new text that no later token can change."""
        assert not self.has_stop
        mark = self._stop.marks.get(token)
        self._held += self._text.add(token) if mark is None else self._text.end() + mark
        if self._stop.patterns:
            whole = self._held + self._text.rest
            index = find_stop(whole, self._stop.patterns)
            self.has_stop = index is not None
            if self.has_stop:
                return self._stop.shown(whole[:index])
        new = settled(self._held, self._stop.patterns)
        self._held = self._held[len(new) :]
        return self._stop.shown(new)

    def end(self) -> str:
        """The text held back so far, when the answer has ended; half a character is dropped."""
        return "" if self.has_stop else self._stop.shown(self._held + self._text.rest)


def find_stop(text: str, strings: tuple[str, ...]) -> int | None:
    """Index at which the first stop string begins.

    >>> find_stop("a = 1\\n\\ndef f", ("def", "\\n\\n")), find_stop("a", ("b",))
    (5, None)
    """
    return min((index for string in strings if (index := text.find(string)) >= 0), default=None)


def settled(text: str, strings: tuple[str, ...]) -> str:
    """The text without a suffix that may be the beginning of a stop string.

    >>> settled("x = 1\\n", ("\\n\\ndef",)), settled("a.b", ("c",))
    ('x = 1', 'a.b')
    """
    for size in range(len(text), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return text[:-size]
    return text

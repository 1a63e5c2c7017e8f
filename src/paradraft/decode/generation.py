"""Where the text of each row ends: at an end-of-sequence token, a stop string, or the length limit.

The end may lie inside an accepted run. What comes after it is cut: neither emitted nor counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import INVALID, Draft, RoundOutput, Verdict
from paradraft.errors import one_line
from paradraft.models.tokenization import REPLACEMENT, GrowingText
from paradraft.ragged import upload
from paradraft.tree import ABSENT, Tree, depths

NOT_NUMBERS = (
    "the {model}'s largest logit is NaN or infinite: its weights are damaged, its dtype overflows (try bfloat16 or "
    "float32), or a processor forbids every token"
)
_FIRST_MARK = 0xD800
"""The first of 2048 characters that no text contains (half a pair in UTF-16)."""


class Stops:
    """Cuts what the rounds commit and remembers which rows have ended, and why.

    Args:
        limits: for each row the most tokens it may get.
        eos_ids: tokens that end a row; the end token itself is emitted.
        texts: for each row its text, which a stop string ends; the token that completes one is emitted, the text
            ends before it. None without stop strings.

    Raises:
        ValueError: a limit is below 1.
    """

    def __init__(
        self, *, limits: list[int], eos_ids: frozenset[int], texts: Sequence[AnswerText] | None = None
    ) -> None:
        if min(limits) < 1:
            raise ValueError(f"max_new_tokens={min(limits)}: ask for at least 1")
        assert texts is None or len(texts) == len(limits)
        self.eos_ids = eos_ids
        self.limits = tuple(limits)
        self.reasons = ["length"] * len(limits)
        """For each row "eos", "stop" or "length"; right once the row has ended."""
        self._texts = texts
        self._left = list(limits)
        self._rows = list(range(len(limits)))

    @property
    def all_finished(self) -> bool:
        """Whether every row has ended."""
        return not any(self._left)

    @property
    def room(self) -> int:
        """Most tokens that any row may still get."""
        return max(self._left)

    def worth(self, k: int, tree: Tree | None) -> int:
        """How deep to draft: no deeper than some row has room for.

        A tree that grows to its budget takes another shape if it is shallower, so it is cut afterwards;
        else what a row gets would depend on the rows beside it.
        """
        room = self.room - 1
        return k if room and tree is not None and tree.budget is not None else min(k, room)

    def limit(self, draft: Draft) -> Draft:
        """The draft without what no row has room for: the target's own token takes the last place.

        Each row by its own limit, so that a row's drafts do not depend on its batch.
        """
        most = [max(self._left[row] - 1, 0) for row in self._rows]
        if draft.tokens.shape[1] <= min(most):
            return draft
        return draft.where(depths(draft.parents) < upload(most, draft.tokens.device)[:, None])

    def cut(self, draft: Draft, verdict: Verdict) -> RoundOutput:
        """The tokens of one round that are really emitted.

        Raises:
            ValueError: the target's or the drafter's logits are not numbers where a token was to be chosen.
        """
        tokens, accepted, drafted, nodes, finished = [], [], [], [], []
        parts = (verdict.tokens, verdict.accepted, draft.tokens, depths(draft.parents))
        for row, committed, kept, guessed, depth in zip(self._rows, *(part.tolist() for part in parts), strict=True):
            emitted = self._emit(row, [token for token in committed if token != ABSENT][: self._left[row]])
            # Deeper in the draft a processor may have forbidden every token, after a guess that does not become text.
            if emitted and any(token == INVALID and not above for token, above in zip(guessed, depth, strict=True)):
                raise ValueError(NOT_NUMBERS.format(model="draft model"))
            tokens.append(emitted)
            accepted.append(min(kept, len(emitted)))
            # Nobody drafts for a row that had ended before.
            deep = [deep + 1 for token, deep in zip(guessed, depth, strict=True) if token >= 0] if emitted else []
            drafted.append(max(deep, default=0))
            nodes.append(len(deep))
            finished.append(self._left[row] == 0)
        return RoundOutput(
            rows=list(self._rows), tokens=tokens, accepted=accepted, drafted=drafted, nodes=nodes, finished=finished
        )

    def _emit(self, row: int, new: list[int]) -> list[int]:
        """Cuts the new tokens of a row at its end, if it is among them."""
        is_valid = INVALID not in new
        new = new if is_valid else new[: new.index(INVALID)]
        end = next((place + 1 for place, token in enumerate(new) if token in self.eos_ids), None)
        if end is not None:
            new, self.reasons[row] = new[:end], "eos"
        if self._texts is not None:
            stop = _first_stop(self._texts[row], new)
            if stop is not None:
                new, self.reasons[row], end = new[:stop], "stop", stop
        if not is_valid and end is None:
            raise ValueError(NOT_NUMBERS.format(model="target"))
        self._left[row] = 0 if end is not None else self._left[row] - len(new)
        return new

    def leave(self, *, at_least: int = 1) -> Tensor | None:
        """Lets rows that have ended go, once they are a quarter of the batch: moving the others costs time too.

        Args:
            at_least: how many rows must stay.

        Returns:
            `[b]` which rows of the batch stay; None if all do.
        """
        batch = len(self._rows)
        going = [place for place, row in enumerate(self._rows) if self._left[row] == 0][: batch - at_least]
        if self.all_finished or not are_enough(len(going), batch):
            return None
        staying = [place for place in range(batch) if place not in set(going)]
        self._rows = [self._rows[place] for place in staying]
        return torch.tensor(staying)


def are_enough(ended: int, batch: int) -> bool:
    """Whether so many rows of a batch have ended that it is worth moving the others together.

    >>> are_enough(3, 16), are_enough(4, 16), are_enough(0, 2)
    (False, True, False)
    """
    return ended * 4 >= batch


def _first_stop(text: AnswerText, new: list[int]) -> int | None:
    """How many of the new tokens it takes to complete a stop string."""
    for number, token in enumerate(new, start=1):
        text.add(token)
        if text.has_stop:
            return number
    return None


@dataclass(frozen=True, kw_only=True)
class StopStrings:
    """The texts that end an answer, as they are searched for.

    A special token has no text in an answer. Where a stop string names one, the token is written into the text that is
    searched as one character that no text contains, and so it is in the stop string.

    Args:
        patterns: what to search for.
        marks: for each special token that a stop string names the character that stands for it.
    """

    patterns: tuple[str, ...] = ()
    marks: Mapping[int, str]

    def shown(self, text: str) -> str:
        """A part of the text that is searched as a reader sees it: without special tokens."""
        return text.translate({ord(mark): None for mark in self.marks.values()})


def stop_strings(stop: str | Sequence[str], special: Mapping[str, int]) -> StopStrings:
    """Reads the stop strings of a request.

    Args:
        stop: one string, or several.
        special: the tokenizer's special tokens by their texts.

    Raises:
        ValueError: it is something else, or a stop string is empty or holds half a character.

    >>> found = stop_strings(["END", "\\n<|im_end|>"], {"<|im_end|>": 7, "<|im_start|>": 6})
    >>> found.patterns, found.marks
    (('END', '\\n<|im_end|>', '\\n\\ud800'), {7: '\\ud800'})
    """
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
    marks = {text: chr(_FIRST_MARK + number) for number, text in enumerate(named)}
    marked = list(strings)
    for text, mark in marks.items():
        marked = [string.replace(text, mark) for string in marked]
    # The model may also spell the name of a special token in other tokens.
    patterns = tuple(dict.fromkeys([*strings, *marked]))
    return StopStrings(patterns=patterns, marks={special[text]: mark for text, mark in marks.items()})


class AnswerText:
    """The text of an answer as it grows, up to the first stop string.

    It depends on the sequence of tokens alone, so a stream and a result, with any drafter, have the same text. A stop
    string ends the answer as soon as the text, if it ended there, would contain it.

    Args:
        text: of the tokens, with none yet.
        stop: what ends it.
    """

    def __init__(self, text: GrowingText, stop: StopStrings) -> None:
        self.has_stop = False
        """Whether a stop string is complete; nothing may be added then."""
        self._text = text
        self._stop = stop
        self._held = ""

    def add(self, token: int) -> str:
        """Takes in one more token; the text that is new, and that no later token takes back."""
        assert not self.has_stop
        mark = self._stop.marks.get(token)
        self._held += self._text.add(token) if mark is None else self._text.end() + mark
        if self._stop.patterns:
            whole = self._held + self._text.rest
            place = find_stop(whole, self._stop.patterns)
            self.has_stop = place is not None
            if self.has_stop:
                return self._stop.shown(whole[:place])
        new = settled(self._held, self._stop.patterns)
        self._held = self._held[len(new) :]
        return self._stop.shown(new)

    def end(self) -> str:
        """The text that is still missing when the answer has ended; half a character is left out."""
        return "" if self.has_stop else self._stop.shown(self._held + self._text.rest)


def find_stop(text: str, strings: tuple[str, ...]) -> int | None:
    """Where the first stop string begins in a text.

    >>> find_stop("a = 1\\n\\ndef f", ("def", "\\n\\n")), find_stop("a", ("b",))
    (5, None)
    """
    return min((place for string in strings if (place := text.find(string)) >= 0), default=None)


def settled(text: str, strings: tuple[str, ...]) -> str:
    """A text without what may be the beginning of a stop string.

    >>> settled("x = 1\\n", ("\\n\\ndef",)), settled("a.b", ("c",))
    ('x = 1', 'a.b')
    """
    for size in range(len(text), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings):
            return text[:-size]
    return text

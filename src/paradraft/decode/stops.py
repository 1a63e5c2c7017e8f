"""Where the text of each row ends: at an end-of-sequence token, a stop string, or the length limit.

The end may lie inside an accepted run. What comes after it is cut: neither emitted nor counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paradraft.core import ABSENT, Draft, Step, Tree, Verdict
from paradraft.tree import depths
from paradraft.upload import upload

HALF_CHARACTER = "\ufffd"
"""What tokenizers write for bytes that are no whole character yet."""


class Stops:
    """Cuts what the rounds commit and remembers which rows have ended, and why.

    Args:
        limits: for each row the most tokens it may get.
        eos_ids: tokens that end a row; the end token itself is emitted.
        strings: texts that end a row; the token that completes one is emitted, the text ends before it.
        text_of: the text of a list of new tokens; needed for `strings`.

    Raises:
        ValueError: a limit is below 1, or a stop string is empty.
    """

    def __init__(
        self,
        *,
        limits: list[int],
        eos_ids: frozenset[int],
        strings: tuple[str, ...] = (),
        text_of: Callable[[list[int]], str] | None = None,
    ) -> None:
        if min(limits) < 1:
            raise ValueError(f"max_new_tokens={min(limits)}: ask for at least 1")
        if "" in strings:
            raise ValueError("a stop string is empty: give at least one character")
        if any(HALF_CHARACTER in string for string in strings):
            raise ValueError("a stop string contains U+FFFD, which stands for half a character: leave it out")
        assert text_of is not None or not strings
        self.eos_ids = eos_ids
        self.strings = strings
        self.reasons = ["length"] * len(limits)
        """For each row "eos", "stop" or "length"; right once the row has ended."""
        self._text_of = text_of
        self._tokens: list[list[int]] = [[] for _ in limits]
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

    def cut(self, draft: Draft, verdict: Verdict) -> Step:
        """The tokens of one round that are really emitted."""
        tokens, accepted, drafted, nodes, finished = [], [], [], [], []
        parts = (verdict.tokens, verdict.accepted, draft.tokens, depths(draft.parents))
        for row, committed, kept, guessed, depth in zip(self._rows, *(part.tolist() for part in parts), strict=True):
            emitted = self._emit(row, [token for token in committed if token != ABSENT][: self._left[row]])
            tokens.append(emitted)
            accepted.append(min(kept, len(emitted)))
            # Nobody drafts for a row that had ended before.
            deep = [deep + 1 for token, deep in zip(guessed, depth, strict=True) if token != ABSENT] if emitted else []
            drafted.append(max(deep, default=0))
            nodes.append(len(deep))
            finished.append(self._left[row] == 0)
        return Step(
            rows=list(self._rows), tokens=tokens, accepted=accepted, drafted=drafted, nodes=nodes, finished=finished
        )

    def _emit(self, row: int, new: list[int]) -> list[int]:
        """Cuts the new tokens of a row at its end, if it is among them."""
        end = next((place + 1 for place, token in enumerate(new) if token in self.eos_ids), None)
        if end is not None:
            new, self.reasons[row] = new[:end], "eos"
        if self.strings and new:
            stop = self._first_stop(self._tokens[row], new)
            if stop is not None:
                new, self.reasons[row], end = new[:stop], "stop", stop
            self._tokens[row] += new
        self._left[row] = 0 if end is not None else self._left[row] - len(new)
        return new

    def _first_stop(self, before: list[int], new: list[int]) -> int | None:
        """How many of the new tokens it takes to complete a stop string."""
        assert self._text_of is not None
        # One token after the other, as in plain decoding: a later token may change the text of earlier ones.
        for number in range(1, len(new) + 1):
            if find_stop(self._text_of(before + new[:number]), self.strings) is not None:
                return number
        return None

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
    return ended > 0 and ended * 4 >= batch


def find_stop(text: str, strings: tuple[str, ...]) -> int | None:
    """Where the first stop string begins in a text.

    >>> find_stop("a = 1\\n\\ndef f", ("def", "\\n\\n")), find_stop("a", ("b",))
    (5, None)
    """
    return min((place for string in strings if (place := text.find(string)) >= 0), default=None)


def settled(text: str, strings: tuple[str, ...]) -> str:
    """The part of a growing text that no later token can take back.

    Held back are half characters at its end, and what may be the beginning of a stop string.

    >>> settled("x = 1\\n", ("\\n\\ndef",)), settled("caf\\ufffd", ()), settled("a.b", ("c",))
    ('x = 1', 'caf', 'a.b')
    """
    text = text.rstrip(HALF_CHARACTER)
    longest = max(map(len, strings), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-size:]) for string in strings if len(string) > size):
            return text[:-size]
    return text

"""Chances of the tokens of a drafter that does not estimate them, learnt from the rounds of each row.

A drafter's confidence is its largest probability at a place. How often such a token is accepted depends on the pair of
models and on the text, so it is counted, by confidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from paradraft.core import Draft
from paradraft.parents import depths_of_row
from paradraft.tree import ABSENT

BINS = 8
"""Number of ranges of confidence."""
UNKNOWN = 0.5
"""The confidence of a drafter that says none."""
PRIOR = 4.0
"""Weight, in tokens, of the confidence itself as the chance."""
MEMORY = 0.98
"""Decay of counts per token, and of the mean length per round with a draft."""
FIRST, FIRST_PRIOR = 2.0, 2.0
"""Accepted tokens of a draft before any is known, and the weight of this guess in drafts."""
AGAIN = 16
"""Rounds without a draft after which one is made, to see how long it would be."""


class RowCalibration:
    """What is known of a row's drafts.

    >>> row = RowCalibration()
    >>> for _ in range(50):
    ...     values = row.values([5, 6], [-1, 0], [0.95, 0.95])
    ...     row.learn([5, 7])
    >>> round(row.accepted, 1), [round(value, 1) for value in values]
    (1.0, [0.5, 0.3])
    """

    def __init__(self) -> None:
        self.lengths = FIRST * FIRST_PRIOR, FIRST_PRIOR
        """Accepted tokens and number of drafts; older ones weigh less."""
        self.skipped = 0
        """Rounds since the last draft."""
        self._was = [PRIOR * (index + 0.5) / BINS for index in range(BINS)]
        self._could = [PRIOR] * BINS
        """By confidence, tokens after accepted ones, and those of them that were accepted."""
        self._children: dict[int, list[tuple[int, int, int]]] = {}
        """By node of the last draft, its children: token, node and bin."""

    @property
    def accepted(self) -> float:
        """Mean number of accepted tokens of a draft."""
        tokens, drafts = self.lengths
        return tokens / drafts

    def values(self, tokens: Sequence[int], parents: Sequence[int], confidences: Sequence[float]) -> list[float]:
        """Remembers a draft; returns the chance of each node and of all above it, 0 for absent ones."""
        self._children = defaultdict(list)
        values: list[float] = []
        for node, (token, parent, confidence) in enumerate(zip(tokens, parents, confidences, strict=True)):
            index = min(int(confidence * BINS), BINS - 1)
            above = values[parent] if parent >= 0 else 1.0
            values.append(above * self._was[index] / self._could[index] if token != ABSENT else 0.0)
            self._children[parent].append((token, node, index))
        return values

    def learn(self, committed: Sequence[int]) -> None:
        """Compares the draft with the tokens that were committed, down to the last that was decided."""
        if not self._children:
            return
        right, at = 0, ABSENT
        for own in committed:
            after = [each for each in self._children.get(at, ()) if each[0] != ABSENT]
            for token, node, index in after:
                self._was[index] = MEMORY * self._was[index] + (token == own)
                self._could[index] = MEMORY * self._could[index] + 1.0
                at = node if token == own else at
            if all(token != own for token, _, _ in after):
                break
            right += 1
        self.lengths = MEMORY * self.lengths[0] + right, MEMORY * self.lengths[1] + 1.0
        self._children = {}


class Calibration:
    """The calibrations of all rows of a batch for one drafter.

    Args:
        is_slow: whether half a draft takes half the time, so that drafts should not be much longer than is accepted.
    """

    def __init__(self, *, is_slow: bool) -> None:
        self._is_slow = is_slow
        self._rows: list[RowCalibration] = []

    def start(self) -> None:
        """Drops all rows."""
        self._rows = []

    def join(self, rows: int) -> None:
        """Adds rows."""
        self._rows += [RowCalibration() for _ in range(rows)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops and reorders rows."""
        self._rows = [self._rows[row] for row in rows]

    def lengths(self, lengths: Sequence[int], expected: Sequence[float]) -> list[int]:
        """The largest depth of each row's draft: 0 where other drafts are expected to have as many accepted tokens.

        Args:
            lengths: the largest depths that are asked for.
            expected: accepted tokens of the other drafts.
        """
        found = []
        for row, k, others in zip(self._rows, lengths, expected, strict=True):
            is_left_out = others >= row.accepted and row.skipped < AGAIN
            row.skipped = row.skipped + 1 if is_left_out else 0
            most = round(row.accepted) + 1 if self._is_slow else k
            found.append(0 if is_left_out else min(k, most))
        return found

    def valued(self, draft: Draft, lengths: Sequence[int]) -> Draft:
        """Cuts a draft to the depths that were asked for, gives it values, and remembers it."""
        asked = zip(*draft.lists, lengths, strict=True)
        are_kept = [[depth <= most for depth in depths_of_row(*row)] for *row, most in asked]
        if not all(map(all, are_kept)):
            draft = draft.where(torch.tensor(are_kept, device=draft.tokens.device))
        unknown = [[UNKNOWN] * draft.tokens.shape[1]] * len(lengths)
        sure = unknown if draft.confidence is None else draft.confidence.tolist()
        rows = zip(self._rows, *draft.lists, sure, strict=True)
        return replace(draft, values=[row.values(*drafted) for row, *drafted in rows])

    def learn(self, committed: Sequence[Sequence[int]]) -> None:
        """Adds the committed tokens of a round."""
        for row, tokens in zip(self._rows, committed, strict=True):
            row.learn(tokens)

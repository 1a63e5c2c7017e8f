"""How far the chances that drafters estimate come true, learnt from all nodes whose turn came."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from paradraft.core import Draft
from paradraft.tree import ABSENT


class Trust:
    """For each part of a union, a factor of the odds of its chances: an online logistic regression with one weight.

    A node's turn comes when all above it are committed, whether it was verified or not.

    >>> trust, draft = Trust(), Draft.of_lists([[5, 6]], values=[[0.9, 0.8]])
    >>> for _ in range(20):
    ...     trust.learn(draft, [[7]])
    >>> trust.odds[0] < 0.3
    True
    """

    MEMORY = 0.98
    """Decay of the information about a part per node."""
    PRIOR = 2.0
    """Information in favour of the chances as they are."""
    MOST = 2.0
    """Largest absolute logarithm of a factor: chances that are too small to be drafted would never be seen again."""

    def __init__(self) -> None:
        self._weights = defaultdict[int, float](float)
        self._known = defaultdict[int, float](float)
        """Information about each weight: how far the chances of its nodes depend on it."""

    @property
    def odds(self) -> Mapping[int, float]:
        """The factors, which drafters apply (`Worth.odds`)."""
        return {part: round(math.exp(weight), 2) for part, weight in self._weights.items()}

    def learn(self, draft: Draft, committed: Sequence[Sequence[int]]) -> None:
        """Compares drafts, made with these factors, with the tokens that were committed.

        Args:
            draft: with values, before it was cut.
            committed: of each row.
        """
        assert draft.values is not None
        for row, (tokens, parents, values, own) in enumerate(zip(*draft.lists, draft.values, committed, strict=True)):
            children = defaultdict[int, list[int]](list)
            for node in range(len(values)):
                children[parents[node]].append(node)
            at = ABSENT
            for token in own:
                right = ABSENT
                for node in children[at]:
                    part = draft.parts[row][node] if draft.parts is not None else 0
                    above = values[at] if at != ABSENT else 1.0
                    self._add(part, values[node] / above if above else 0.0, is_right=tokens[node] == token)
                    right = node if tokens[node] == token else right
                if right == ABSENT:
                    break
                at = right

    def _add(self, part: int, chance: float, *, is_right: bool) -> None:
        self._known[part] = self.MEMORY * self._known[part] + chance * (1.0 - chance)
        weight = self._weights[part] + (is_right - chance) / (self.PRIOR + self._known[part])
        self._weights[part] = min(max(weight, -self.MOST), self.MOST)

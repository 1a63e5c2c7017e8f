"""The likeliest next tokens at every place of a pass, for drafters that learn from them (`Drafter.likeliest`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paradraft.tree import ABSENT


@dataclass(frozen=True, kw_only=True)
class Likeliest:
    """The likeliest tokens after the last committed token and after each node of the draft, refused ones included.

    Args:
        read: by row, the tokens of the draft's N nodes, `ABSENT` where a row has fewer.
        parents: by row, the index of each node's parent; -1 is the last committed token.
        tokens: by row and place, the best first; place 0 follows the last committed token, place n + 1 node n.
            `ABSENT` after the last whose logit is above -inf; biases, penalties and grammars are not applied.
        logits: theirs.
    """

    read: list[list[int]]
    parents: list[list[int]]
    tokens: list[list[list[int]]]
    logits: list[list[list[float]]]

    def places(self, row: int, before: int, last: int) -> Iterator[tuple[tuple[int, int], list[int], list[float]]]:
        """The places of a row: the two tokens before each, the likeliest tokens and their logits.

        Args:
            before: the committed token before the last one.
            last: the last committed token.

        >>> likeliest = Likeliest(
        ...     read=[[5, -1, 6]], parents=[[-1, -1, 0]], tokens=[[[5], [6], [9], [7]]], logits=[[[2.0]] * 4]
        ... )
        >>> [(pair, tokens) for pair, tokens, _ in likeliest.places(0, 3, 4)]
        [((3, 4), [5]), ((4, 5), [6]), ((5, 6), [7])]
        """
        pairs = [(before, last)]
        yield pairs[0], self.tokens[row][0], self.logits[row][0]
        for node, (token, parent) in enumerate(zip(self.read[row], self.parents[row], strict=True), start=1):
            pairs.append((pairs[parent + 1][1], token))
            if token != ABSENT:
                yield pairs[node], self.tokens[row][node], self.logits[row][node]

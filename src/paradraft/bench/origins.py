"""How the tokens of an answer came: drafted and accepted, at which position, or the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paradraft.models.texts import REPLACEMENT

Piece = tuple[str, int]
"""A token's text, and its position in the draft, counted from 1; 0 for the target's own."""


def origins(accepted: Sequence[int], tokens: int) -> list[int]:
    """For each token of an answer its position in the draft; 0 for the target's own.

    Args:
        accepted: for each round, how many of its tokens were drafted.
        tokens: how many tokens the answer has; the last round may have been cut.

    >>> origins([2, 0, 1], 5)
    [1, 2, 0, 0, 1]
    """
    return [place for kept in accepted for place in (*range(1, kept + 1), 0)][:tokens]


def pieces(tokens: Sequence[int], accepted: Sequence[int], text_of: Callable[[list[int]], str]) -> list[Piece]:
    """The text of an answer, token by token.

    A character of several tokens stands with its last one.

    Args:
        tokens: of the answer.
        accepted: see `origins`.
        text_of: the text of a list of tokens.
    """
    found: list[Piece] = []
    shown = 0
    for number, origin in enumerate(origins(accepted, len(tokens)), start=1):
        text = text_of(list(tokens[:number]))
        if number < len(tokens):
            text = text.rstrip(REPLACEMENT)
        found.append((text[shown:], origin))
        shown = max(shown, len(text))
    return found

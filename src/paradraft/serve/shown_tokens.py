"""Tokens with their probabilities, as clients see them."""

from __future__ import annotations

from dataclasses import dataclass

from paradraft.engine.engine import Chunk, Engine
from paradraft.serve.questions import Choice
from paradraft.text.tokenization import REPLACEMENT

LEAST = -9999.0
"""In place of the logarithm of 0, which JSON does not have."""


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """A token, and how likely it is.

    Args:
        name: its text, or "token_id:" and its id.
        text: decoded alone, special tokens too.
        logprob: the natural logarithm of its probability.
        likeliest: the likeliest tokens in its place.
    """

    name: str
    text: str
    logprob: float
    likeliest: tuple[ShownToken, ...] = ()

    @property
    def bytes(self) -> list[int] | None:
        """In UTF-8; None where the text does not say, because the token is a part of a character."""
        return None if REPLACEMENT in self.text else list(self.text.encode())


def shown_tokens(chunk: Chunk, choice: Choice, engine: Engine, *, by_id: bool) -> list[ShownToken] | None:
    """The tokens of a piece; None if their probabilities are not asked for.

    Args:
        chunk: the piece.
        choice: whose it is.
        engine: has decoded it.
        by_id: whether they are named by their ids, which texts do not always tell.
    """
    if choice.logprobs is None:
        return None

    def shown(token: int, logprob: float, likeliest: tuple[ShownToken, ...] = ()) -> ShownToken:
        text = str(engine.target.tokenizer.decode([token]))
        name = f"token_id:{token}" if by_id else text
        return ShownToken(name=name, text=text, logprob=max(logprob, LEAST), likeliest=likeliest)

    return [
        shown(each.token, each.logprob, tuple(shown(token, logprob) for token, logprob in each.likeliest))
        for each in chunk.logprobs
    ]

"""Tokens with log probabilities, as clients see them."""

from __future__ import annotations

from dataclasses import dataclass

from paradraft.engine.engine import Chunk, Engine
from paradraft.serve.questions import Choice
from paradraft.text.tokenization import REPLACEMENT

LEAST = -9999.0
"""Log probability of 0, because JSON has no infinity."""


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """A token and its log probability.

    Args:
        name: its text, or "token_id:" and its id.
        text: decoded alone, special tokens too.
        likeliest: top tokens at its position.
    """

    name: str
    text: str
    logprob: float
    likeliest: tuple[ShownToken, ...] = ()

    @property
    def bytes(self) -> list[int] | None:
        """UTF-8 bytes; None if the token is part of a character, whose bytes the text does not show."""
        return None if REPLACEMENT in self.text else list(self.text.encode())


def shown_tokens(chunk: Chunk, choice: Choice, engine: Engine, *, by_id: bool) -> list[ShownToken] | None:
    """Tokens of a chunk; None if log probabilities are not requested.

    With `by_id` tokens are named by their ids, because different tokens may have the same text.
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

"""The rounds of a server, and what is asked of a draft that they are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass of the target, as the server has streamed it.

    Args:
        prompt: how many tokens of `text` are the prompt.
        text: the tokens before this pass.
        following: the tokens of the answer from this pass on.
        accepted: how many of these are drafted tokens.
    """

    prompt: int
    text: list[int]
    following: list[int]
    accepted: int


@dataclass(frozen=True, kw_only=True)
class AuditedDraft(ABC):
    """A draft, and how an engine should use it.

    Args:
        k: tokens that are drafted a round.
        is_k_known: whether an engine drafts as many; else `k` is an upper limit.
        special: further ids that an engine could take for the mask, such as the end of a text.
        training_rows: most tokens of the rows that it was trained on; None if unknown.
    """

    k: int
    is_k_known: bool = True
    special: tuple[int, ...] = ()
    training_rows: int | None = None

    @property
    @abstractmethod
    def rows(self) -> int:
        """Ids from there on cannot be read."""

    @property
    @abstractmethod
    def is_quantized(self) -> bool:
        """Whether its weights have few bits, which an engine may not read."""

    @property
    @abstractmethod
    def sound(self) -> Any:
        """The way to draft without a fault."""

    def with_k(self, k: int) -> Self:
        """A copy that drafts k tokens."""
        return replace(self, k=k)

    @abstractmethod
    def accepted(self, rounds: Sequence[Round], mode: Any) -> list[int]:
        """By round, how many drafted tokens the answers go on with.

        Args:
            mode: `sound`, or the way of a fault.
        """

    @abstractmethod
    def faults(self) -> Iterator[tuple[str, Any]]:
        """Faults of engines, each as a clause and as a way to draft."""


def accepted_of(rounds: Sequence[Round], drafts: Sequence[Sequence[int]]) -> list[int]:
    """By round, how many tokens of its draft the answer goes on with."""
    counts = []
    for each, tokens in zip(rounds, drafts, strict=True):
        pairs = zip(tokens, each.following, strict=False)
        most = min(len(tokens), len(each.following))
        counts.append(next((index for index, (a, b) in enumerate(pairs) if a != b), most))
    return counts

"""Prompts that all methods of a benchmark answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Answers = Callable[[list[str], int], list[str]]
"""The target's answers to prompts, with at most so many tokens each."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts that all methods answer.

    Args:
        count: how many there are.
        max_new_tokens: most tokens of an answer.
        prompts: what they are, given what asks the target; some hold its own answers to others.
        name: of the task, if it is one.
    """

    count: int
    max_new_tokens: int
    prompts: Callable[[Answers], list[str]]
    name: str = ""

    @classmethod
    def of(cls, prompts: list[str], max_new_tokens: int) -> Work:
        """Texts that are known."""
        return cls(count=len(prompts), max_new_tokens=max_new_tokens, prompts=lambda _: prompts)

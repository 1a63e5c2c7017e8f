"""Words of messages that depend on values."""

from __future__ import annotations


def number_of(number: int, noun: str) -> str:
    """A number and what it counts.

    >>> [number_of(number, "token") for number in (0, 1, 2)]
    ['0 tokens', '1 token', '2 tokens']
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

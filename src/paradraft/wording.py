"""Singular and plural in messages."""

from __future__ import annotations


def number_of(count: int, noun: str) -> str:
    """A count with its noun.

    >>> [number_of(count, "token") for count in (0, 1, 2)]
    ['0 tokens', '1 token', '2 tokens']
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

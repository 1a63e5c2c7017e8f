"""Where prompts come from, as results and titles say it."""

from __future__ import annotations

from pathlib import Path

STDIN = "-"
"""The file that is the standard input."""
DEFAULT = "Python functions to complete, held-out modules of the pocket family"
"""What is asked where a command that measures is given no prompts; also how a result names them."""
PIPE = "a pipe"
"""What a result calls a file that has no name, as in `--prompts <(…)`."""
RANDOM = "random tokens"
"""What a model with random weights is asked."""


def counted(number: int, source: str | None) -> str:
    """How many prompts, and what they are, for a title.

    Args:
        number: of prompts.
        source: `DEFAULT`, `RANDOM`, `PIPE`, a file, or None if that is not known.

    >>> [counted(8, source) for source in (DEFAULT, RANDOM, None)]
    ['8 Python functions to complete', '8 random prompts', '8 prompts']
    >>> [counted(8, source) for source in ("asked/mine.jsonl", "-", PIPE)]
    ['8 prompts of mine.jsonl', '8 prompts from stdin', '8 prompts from a pipe']
    """
    if source is None:
        return f"{number} prompts"
    if source in (DEFAULT, RANDOM):
        return f"{number} {source.partition(',')[0]}" if source == DEFAULT else f"{number} random prompts"
    if source in (STDIN, PIPE):
        return f"{number} prompts from {'stdin' if source == STDIN else PIPE}"
    return f"{number} prompts of {Path(source).name}"

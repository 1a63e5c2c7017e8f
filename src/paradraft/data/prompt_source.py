"""Where prompts come from, as results and titles say it."""

from __future__ import annotations

from pathlib import Path

from paradraft.wording import number_of

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
    >>> counted(1, "mine.jsonl"), counted(1, DEFAULT)
    ('1 prompt of mine.jsonl', '1 Python function to complete')
    >>> [counted(8, source) for source in ("asked/mine.jsonl", "-", PIPE)]
    ['8 prompts of mine.jsonl', '8 prompts from stdin', '8 prompts from a pipe']
    """
    if source == DEFAULT:
        return f"{number_of(number, 'Python function')} to complete"
    if source == RANDOM:
        return number_of(number, "random prompt")
    prompts = number_of(number, "prompt")
    if source is None:
        return prompts
    if source in (STDIN, PIPE):
        return f"{prompts} from {'stdin' if source == STDIN else PIPE}"
    return f"{prompts} of {Path(source).name}"

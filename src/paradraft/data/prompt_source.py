"""Names of prompt sources in results and titles."""

from __future__ import annotations

from pathlib import Path

from paradraft.wording import number_of

STDIN = "-"
"""The file that is the standard input."""
DEFAULT = "Python functions to complete, held-out modules of the pocket family"
"""Name of the default prompts of commands that measure."""
PIPE = "a pipe"
"""Name of a file without a name, as in `--prompts <(…)`."""
RANDOM = "random tokens"
"""Name of the prompts of a model with random weights."""


def counted(count: int, source: str | None) -> str:
    """Count and source of prompts, for a title.

    Args:
        source: `DEFAULT`, `RANDOM`, `PIPE`, a file, or None if unknown.

    >>> [counted(8, source) for source in (DEFAULT, RANDOM, None)]
    ['8 Python functions to complete', '8 random prompts', '8 prompts']
    >>> counted(1, "mine.jsonl"), counted(1, DEFAULT)
    ('1 prompt of mine.jsonl', '1 Python function to complete')
    >>> [counted(8, source) for source in ("asked/mine.jsonl", "-", PIPE)]
    ['8 prompts of mine.jsonl', '8 prompts from stdin', '8 prompts from a pipe']
    """
    if source == DEFAULT:
        return f"{number_of(count, 'Python function')} to complete"
    if source == RANDOM:
        return number_of(count, "random prompt")
    prompts = number_of(count, "prompt")
    if source is None:
        return prompts
    if source in (STDIN, PIPE):
        return f"{prompts} from {'stdin' if source == STDIN else PIPE}"
    return f"{prompts} of {Path(source).name}"

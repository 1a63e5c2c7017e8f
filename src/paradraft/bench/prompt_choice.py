"""The prompts of a benchmark: a file's, the pocket family's, or random ones for a shape."""

from __future__ import annotations

import random
from pathlib import Path

from paradraft.models.loading import pocket_folder
from paradraft.models.shapes import is_shape, shape_of
from paradraft.prompts import read_prompts


def held_out_prompts(number: int, file: Path | None) -> list[str]:
    """The first prompts of a file; without one, of the pocket family's held-out modules.

    Raises:
        ValueError: the file cannot be read or has fewer prompts.
    """
    file = file or pocket_folder("prompts.jsonl")
    records = read_prompts(file)
    if not 1 <= number <= len(records):
        raise ValueError(f"num_prompts={number}: use 1 to {len(records)}, which is how many {file.name} has")
    return [str(record["prompt"]) for record in records[:number]]


def prompts_for(target: str, number: int, *, tokens: int, file: Path | None) -> list[str]:
    """The prompts of a run: random ones of so many tokens for a shape, which reads no texts, else those of a file.

    Raises:
        ValueError: there is no such shape or file, or a shape is to read a file.
    """
    if not is_shape(target):
        return held_out_prompts(number, file)
    found = random_prompts(target, number, tokens)
    if file is not None:
        raise ValueError(f"--prompts {file}: {target!r} reads no texts, its prompts are random: give --prompt-tokens")
    return found


def random_prompts(shape: str, number: int, tokens: int) -> list[str]:
    """Prompts for a shape: random token ids, written as its tokenizer reads them.

    Raises:
        ValueError: there is no such shape, or a number is below 1.

    >>> random_prompts("shape:tiny-target", 2, 3)
    ['49 53 5', '33 65 62']
    """
    if number < 1 or tokens < 1:
        raise ValueError(f"num_prompts={number}, prompt_tokens={tokens}: use at least 1")
    chooser, ids = random.Random(0), shape_of(shape).mask_id
    return [" ".join(str(chooser.randrange(ids)) for _ in range(tokens)) for _ in range(number)]

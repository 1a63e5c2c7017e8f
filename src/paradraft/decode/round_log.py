"""A log of answers and of the rounds that made them, to train a drafter on what it drafts in use.

A line is JSON: `tokens` are the token ids of prompt and answer, `prompt_tokens` the number of the prompt's, `begins`
the text of the first `COMPARED` tokens, by which a training recognizes the tokenizer. For each round that drafted, if
any, `rounds` has the index in `tokens` of the last token that was committed before it, `depths` the depth of its draft,
and `accepted` the number of drafted tokens that were accepted. The file holds what users wrote: it is only written
where it is asked for, and is created for its owner alone.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import warnings
from io import FileIO
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paradraft.decode.generation import Generation
from paradraft.text.tokenization import exact_text

BEGINNING = b'{"tokens":'
"""Of each line."""
COMPARED = 32
"""Tokens of an answer and its prompt whose text a line has."""


def prepare(file: Path) -> None:
    """Creates the log unless it exists, for its owner alone; removes a last line that a process did not finish.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with _opened(file) as log:
            _remove_torn_line(log)
    except OSError as error:
        raise ValueError(f"rounds={str(file)!r} cannot be written: {error.strerror}") from None


class RoundLog:
    """Appends the ended answers of an engine to a file, after `prepare`.

    Args:
        file: JSONL; its folder exists.
        tokenizer: the target's.
        most_bytes: a file of this size is renamed to FILE.1, in place of an earlier one; None for any size.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, file: Path, tokenizer: PreTrainedTokenizerBase, *, most_bytes: int | None = None) -> None:
        prepare(file)
        self.file, self._tokenizer, self._most_bytes = file.absolute(), tokenizer, most_bytes
        self._lock = threading.Lock()
        self._is_broken = False

    def add(self, generation: Generation) -> None:
        """Appends an ended answer; warns once, and then no more, if the disk is full."""
        if self._is_broken:
            return
        record = record_of(generation, self._tokenizer)
        line = f"{json.dumps(record, separators=(',', ':'))}\n".encode()
        try:
            # One write, so that lines of several processes stay whole.
            with self._lock, _opened(self.file) as log:
                if log.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                size = log.tell()
            if self._most_bytes is not None and size >= self._most_bytes:
                self.file.replace(self.file.with_name(f"{self.file.name}.1"))
        except OSError as error:
            self._is_broken = True
            warnings.warn(f"rounds are no longer written to {self.file}: {error.strerror}", stacklevel=2)


def _opened(file: Path) -> FileIO:
    """The file; made for its owner alone where it does not exist, as after it was moved away to be learnt."""
    return FileIO(os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+b")


def _remove_torn_line(log: FileIO) -> None:
    size = log.seek(0, os.SEEK_END) if log.seekable() else 0
    step, tail = 2**16, b""
    while len(tail) < size and b"\n" not in tail:
        log.seek(max(size - step, 0))
        tail, step = log.readall(), 2 * step
    torn = tail.rpartition(b"\n")[2]
    if torn.startswith(BEGINNING):
        log.truncate(size - len(torn))


def record_of(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int] | int | str]:
    """The line of an answer."""
    prompt = generation.request.tokens
    starts = [0, *generation.round_ends[:-1]]
    facts = zip(starts, generation.round_ends, generation.depths, generation.accepted, strict=True)
    # An answer that ends among accepted tokens is cut there, and nothing of the draft so far was refused.
    rounds = [
        (len(prompt) - 1 + start, accepted if accepted == end - start else depth, accepted)
        for start, end, depth, accepted in facts
        if depth
    ]
    roots, depths, accepted = zip(*rounds, strict=True) if rounds else ((), (), ())
    tokens = [*prompt, *generation.tokens]
    return {
        "tokens": tokens,
        "prompt_tokens": len(prompt),
        "begins": exact_text(tokens[:COMPARED], tokenizer),
        "rounds": list(roots),
        "depths": list(depths),
        "accepted": list(accepted),
    }

"""A log of answers and of the rounds that made them, to train a drafter on what it drafts in use.

A line is JSON: `tokens` are the token ids of prompt and answer, `prompt_tokens` the number of the prompt's. For each
round that drafted, if any, `rounds` has the index in `tokens` of the last token that was committed before it, `depths`
the depth of its draft, and `accepted` the number of drafted tokens that were accepted. The file holds what users wrote:
it is only written where it is asked for, and is created for its owner alone.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import warnings
from io import FileIO
from pathlib import Path

from paradraft.decode.generation import Generation

BEGINNING = b'{"tokens":'
"""Of each line."""


class RoundLog:
    """Appends the ended answers of an engine to a file, which it creates.

    Args:
        file: JSONL; its folder exists. A last line that an earlier process did not finish is removed.
        most_bytes: a file of this size is renamed to FILE.1, in place of an earlier one; None for any size.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, file: Path, *, most_bytes: int | None = None) -> None:
        self.file, self._most_bytes = file.absolute(), most_bytes
        self._lock = threading.Lock()
        self._is_broken = False
        try:
            with self._opened() as log:
                _remove_torn_line(log)
        except OSError as error:
            raise ValueError(f"rounds={str(file)!r} cannot be written: {error.strerror}") from None

    def add(self, generation: Generation) -> None:
        """Appends an ended answer; warns once, and then no more, if the disk is full."""
        if self._is_broken:
            return
        line = f"{json.dumps(record_of(generation), separators=(',', ':'))}\n".encode()
        try:
            # One write, so that lines of several processes stay whole.
            with self._lock, self._opened() as log:
                if log.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                size = log.tell()
            if self._most_bytes is not None and size >= self._most_bytes:
                self.file.replace(self.file.with_name(f"{self.file.name}.1"))
        except OSError as error:
            self._is_broken = True
            warnings.warn(f"rounds are no longer written to {self.file}: {error.strerror}", stacklevel=2)

    def _opened(self) -> FileIO:
        """The file; made for its owner alone where it does not exist, as after it was moved away to be learnt."""
        return FileIO(os.open(self.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+b")


def _remove_torn_line(log: FileIO) -> None:
    size = log.seek(0, os.SEEK_END) if log.seekable() else 0
    step, tail = 2**16, b""
    while len(tail) < size and b"\n" not in tail:
        log.seek(max(size - step, 0))
        tail, step = log.readall(), 2 * step
    torn = tail.rpartition(b"\n")[2]
    if torn.startswith(BEGINNING):
        log.truncate(size - len(torn))


def record_of(generation: Generation) -> dict[str, list[int] | int]:
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
    return {
        "tokens": [*prompt, *generation.tokens],
        "prompt_tokens": len(prompt),
        "rounds": list(roots),
        "depths": list(depths),
        "accepted": list(accepted),
    }

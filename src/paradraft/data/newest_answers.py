"""The newest answers of a log of rounds, some of them held out; see `paradraft.decode.round_log`."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from paradraft.data.tokens.token_cache import SMALL_BYTES
from paradraft.sources.records import LOG_KEYS
from paradraft.wording import number_of

ONE_IN, LEAST, MOST = 6, 6, 32
"""The answers to one in `ONE_IN` prompts are held out: at least `LEAST`, of which the newest `MOST` measure."""
FEWEST = 24
"""Answers of the smallest refresh."""
PIECE = 2**20
"""Bytes read at once from the end of a log."""


@dataclass(frozen=True, kw_only=True)
class LoggedAnswer:
    """An answer in a log of rounds."""

    text: bytes
    tokens: list[int]
    prompt: list[int]

    @classmethod
    def of(cls, text: bytes) -> LoggedAnswer | None:
        """None for what `--rounds` does not write."""
        try:
            record = json.loads(text)
            if record.keys() >= LOG_KEYS:
                return cls(text=text, tokens=record["tokens"], prompt=record["tokens"][: int(record["prompt_tokens"])])
        except (ValueError, AttributeError, TypeError):
            pass
        return None


def newest_lines(log: Path, most: int) -> list[bytes]:
    """The last whole lines of a log, the newest last."""
    start = size = log.stat().st_size
    lines: list[bytes] = []
    with log.open("rb") as file:
        while start and len(lines) <= most:
            start = max(min(size - PIECE, 2 * start - size), 0)
            file.seek(start)
            lines = file.read(size - start).splitlines(keepends=True)[start > 0 :]
    return [line for line in lines if line.endswith(b"\n")][-most:]


def split(lines: list[LoggedAnswer]) -> tuple[list[LoggedAnswer], list[LoggedAnswer]]:
    """Answers to learn, and held-out ones, the newest first.

    A digest decides, of the prompt or, where there are few prompts, of the answer too. So what measures a refresh was
    learnt by none before it, unless there were too few answers to hold out one in `ONE_IN`.

    Raises:
        ValueError: there are too few lines, or too few different ones.
    """
    if len(lines) < FEWEST:
        raise ValueError(
            f"the log has {number_of(len(lines), 'answer')} to learn, a refresh needs {FEWEST}: wait for more"
        )
    for part in (lambda line: line.prompt, lambda line: line.tokens):
        for share in (1, 2):
            aside = [zlib.crc32(json.dumps(part(line)).encode()) % ONE_IN < share for line in lines]
            if LEAST <= sum(aside) <= len(lines) // 2:
                held_out = [line for line, is_aside in zip(lines, aside, strict=True) if is_aside]
                learnt = [line for line, is_aside in zip(lines, aside, strict=True) if not is_aside]
                return learnt, held_out[: -MOST - 1 : -1]
    raise ValueError("the answers of the log are too much alike to hold some of them out: wait for others")


def written(folder: Path, learnt: list[LoggedAnswer], held_out: list[LoggedAnswer]) -> list[dict[str, Any]]:
    """The two as data of a recipe, in files for their owner alone: users wrote them.

    The files are small, so that no token cache keeps them.
    """
    folder.mkdir(mode=0o700)
    sources: list[dict[str, Any]] = []
    for lines, weight in ((learnt, 1), (held_out, 0)):
        ends = accumulate(len(line.text) for line in lines)
        for _, part in groupby(zip(lines, ends, strict=True), key=lambda pair: pair[1] // (SMALL_BYTES // 2)):
            file = folder / f"{len(sources)}.jsonl"
            file.write_bytes(b"".join(line.text for line, _ in part))
            sources.append({"path": str(file), "weight": weight})
    return sources

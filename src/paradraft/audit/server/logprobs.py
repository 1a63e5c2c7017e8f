"""Reads the log-probabilities of a chunk, in the form of `/completions` or of `/chat/completions`."""

from __future__ import annotations

import math
from typing import Any

MOST_LOGPROB = 0.01
"""Log-probabilities are at most 0; up to here is rounding."""


class UnreadableError(Exception):
    """Raised for parts of an answer that do not have OpenAI's form."""


def token_of(value: Any) -> int:
    """A token id; raises `UnreadableError`."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UnreadableError from None


def logprob_of(value: Any) -> float:
    """A log-probability; raises `UnreadableError`."""
    try:
        logprob = float(value)
    except (TypeError, ValueError):
        raise UnreadableError from None
    if math.isnan(logprob) or logprob > MOST_LOGPROB:
        raise UnreadableError
    return logprob


def rows_of(logprobs: Any) -> list[tuple[str, int | None, float, list[tuple[str, int | None, float]]]]:
    """Name, id, log-probability, and the same of the likeliest tokens, of each token of a chunk in either form."""
    if "content" in logprobs:
        return [
            (
                entry["token"],
                entry.get("id"),
                entry["logprob"],
                [(each["token"], each.get("id"), each["logprob"]) for each in entry.get("top_logprobs") or ()],
            )
            for entry in logprobs["content"] or ()
        ]
    best = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    if not len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(best):
        raise UnreadableError
    return [
        (name, None, logprob, [(other, None, value) for other, value in (likeliest or {}).items()])
        for name, logprob, likeliest in zip(logprobs["tokens"], logprobs["token_logprobs"], best, strict=True)
    ]

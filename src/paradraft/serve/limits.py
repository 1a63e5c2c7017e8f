"""Concurrency and size limits of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paradraft.errors import real_number, whole_number


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Concurrency and size limits of a server.

    Args:
        max_batch: maximum batch size; a request with `n=4` counts as 4.
        max_queue: most answers in the queue; more are rejected.
        max_new_tokens: most tokens of an answer.
        max_body_bytes: most bytes of a request.
        timeout_s: timeout of a request, time in the queue included.
        drain_s: time that running requests have at shutdown.

    Raises:
        ValueError: a limit is no number, or out of range.
    """

    max_batch: int = 8
    max_queue: int = 64
    max_new_tokens: int = 4096
    max_body_bytes: int = 2**20
    timeout_s: float = 600.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_queue", 0), ("max_new_tokens", 1), ("max_body_bytes", 1)):
            if whole_number(name, value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value}: use at least {least}")
        if not 0.0 < real_number("timeout_s", self.timeout_s) < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s}: use a number of seconds above 0")
        if not 0.0 <= real_number("drain_s", self.drain_s) < math.inf:
            raise ValueError(f"drain_s={self.drain_s}: use a number of seconds, 0 to wait for nobody")

"""How steady the machine was while a plan was made: plain rounds of one prompt, timed now and then."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from paradraft.bench.latency import milliseconds
from paradraft.bench.steadiness import ADVICE, UNSTEADY, percent, spread
from paradraft.decode.generation import Generation
from paradraft.engine.engine import Engine
from paradraft.engine.request import requests_of
from paradraft.sampling_params import Sampling

LEAST_S = 0.2
"""Seconds of rounds in one look: long enough for a median, short against the seconds of a batch size."""
FEWEST, MOST = 16, 128
"""Rounds in one look."""


class Watch:
    """Times the same plain rounds again and again: what differs is the machine.

    Args:
        engine: without a drafter; its target may decode other batches between two looks.
        prompt: a text that fits into the target.
        sampling: how tokens are chosen.
    """

    def __init__(self, engine: Engine, prompt: str, sampling: Sampling) -> None:
        self._engine = engine
        (request,) = requests_of(engine.target, [prompt], 1, sampling)
        room = engine.target.capacity - len(request.tokens)
        self._request = replace(request, max_new_tokens=min(MOST, room), eos_ids=frozenset())
        self._rounds: int | None = None
        self.medians_s: list[float] = []
        """A typical plain round at each look."""

    def look(self) -> None:
        """Decodes the prompt once, the first time twice: so much for what is compiled or cached."""
        if self._rounds is None:
            self._rounds = len(self._decode())
        self.medians_s.append(statistics.median(self._decode()))

    def _decode(self) -> list[float]:
        """The seconds of each round; as many as at the first time, which is over when they are enough."""
        batch, found = self._engine.new_batch(), list[float]()
        with self._engine.in_round():
            batch.join([Generation(self._request)])
            while not batch.is_finished and len(found) != self._rounds:
                began_s = time.perf_counter()
                batch.step()
                found.append(time.perf_counter() - began_s)
                if self._rounds is None and len(found) >= FEWEST and sum(found) >= LEAST_S:
                    break
            batch.clear()
        return found

    def as_json(self) -> dict[str, Any]:
        """`plain_round_ms` at each look, their `spread`, and `is_steady`."""
        apart = spread(self.medians_s)
        times_ms = [1e3 * median_s for median_s in self.medians_s]
        return {"plain_round_ms": times_ms, "spread": apart, "is_steady": apart <= UNSTEADY}


def unsteady_plan(plan: dict[str, Any]) -> str | None:
    """A line that says that the plain speed moved while a plan was made; None where it did not.

    >>> found = {"plain_round_ms": [1.9, 2.6, 2.0], "spread": 0.368, "is_steady": False}
    >>> unsteady_plan({"steadiness": found})
    'unsteady machine: plain rounds took 1.90 to 2.60 ms (37 %); run it again when it is idle'
    """
    found = plan["steadiness"]
    if found["is_steady"]:
        return None
    fast, slow = (milliseconds(pick(found["plain_round_ms"])) for pick in (min, max))
    return f"unsteady machine: plain rounds took {fast} to {slow} ms ({percent(found['spread'])}); {ADVICE}"

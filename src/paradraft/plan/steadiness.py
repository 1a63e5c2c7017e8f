"""Measures how steady the machine is during planning: plain rounds of a prompt are timed now and then."""

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
"""Minimum seconds of rounds in a look: long enough for a median, short compared with timing a batch size."""
FEWEST, MOST = 16, 128
"""Rounds in a look."""


class Watch:
    """Times the same plain rounds repeatedly, so differences are the machine's.

    Args:
        engine: without a drafter; its target may decode other batches between looks.
        prompt: a text that fits into the target.
    """

    def __init__(self, engine: Engine, prompt: str, sampling: Sampling) -> None:
        self._engine = engine
        (request,) = requests_of(engine.target, [prompt], 1, sampling)
        room = engine.target.capacity - len(request.tokens)
        self._request = replace(request, max_new_tokens=min(MOST, room), eos_ids=frozenset())
        self._rounds: int | None = None
        self.medians_s: list[float] = []
        """Median plain round of each look."""

    def look(self) -> None:
        """Decodes the prompt once; the first time twice, to warm up compiled code and caches."""
        if self._rounds is None:
            self._rounds = len(self._decode())
        self.medians_s.append(statistics.median(self._decode()))

    def _decode(self) -> list[float]:
        """Seconds of each round; the first call fixes the number of rounds."""
        batch, seconds = self._engine.new_batch(), list[float]()
        with self._engine.in_round():
            batch.join([Generation(self._request)])
            while not batch.is_finished and len(seconds) != self._rounds:
                began_s = time.perf_counter()
                batch.step()
                seconds.append(time.perf_counter() - began_s)
                if self._rounds is None and len(seconds) >= FEWEST and sum(seconds) >= LEAST_S:
                    break
            batch.clear()
        return seconds

    def as_json(self) -> dict[str, Any]:
        """`plain_round_ms` at each look, their `spread`, and `is_steady`."""
        relative_spread = spread(self.medians_s)
        times_ms = [1e3 * median_s for median_s in self.medians_s]
        return {"plain_round_ms": times_ms, "spread": relative_spread, "is_steady": relative_spread <= UNSTEADY}


def unsteady_plan(plan: dict[str, Any]) -> str | None:
    """A warning that the plain speed varied during planning; None if it did not.

    >>> steadiness = {"plain_round_ms": [1.9, 2.6, 2.0], "spread": 0.368, "is_steady": False}
    >>> unsteady_plan({"steadiness": steadiness})
    'unsteady machine: plain rounds took 1.90 to 2.60 ms (37 %); run it again when it is idle'
    """
    steadiness = plan["steadiness"]
    if steadiness["is_steady"]:
        return None
    fast, slow = (milliseconds(pick(steadiness["plain_round_ms"])) for pick in (min, max))
    return f"unsteady machine: plain rounds took {fast} to {slow} ms ({percent(steadiness['spread'])}); {ADVICE}"

"""Measures both sides of drafting ahead (PEARL): the time that each worked, and waited for the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paradraft.bench.hardware.roofline import decoding_passes
from paradraft.core import Drafter
from paradraft.decode.pearl.pearl_colocated import CoLocatedDrafter
from paradraft.decode.pearl.remote import RemoteDrafter, Span
from paradraft.models.causal_lm import CausalLM

SHOWN_ROUNDS = 16
"""Rounds of a timeline."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Work of both sides in one answer.

    Args:
        target: its passes, in order.
        draft: drafted windows, in order; one for each pass, unless the target waits for the first.
    """

    target: tuple[Span, ...]
    draft: tuple[Span, ...]
    forwards: dict[str, int]

    @classmethod
    def of(cls, spans: Sequence[Span], forwards: dict[str, int]) -> Sides:
        """From the spans of both sides."""
        sides = {side: tuple(span for span in spans if span.side == side) for side in ("target", "draft")}
        return cls(**sides, forwards=forwards)

    def timeline(self) -> list[tuple[str, float, float]]:
        """For the first rounds side, begin and end of each piece of work, in milliseconds."""
        spans = sorted((*self.target, *self.draft), key=lambda span: span.began_s)[: 2 * SHOWN_ROUNDS]
        first_s = spans[0].began_s if spans else 0.0
        return [(span.side, 1e3 * (span.began_s - first_s), 1e3 * (span.ended_s - first_s)) for span in spans]


def forwards(models: dict[str, CausalLM], drafter: Drafter) -> dict[str, int]:
    """Decoding passes of each side since the answer began; the draft model may be in another process."""
    draft = sum(decoding_passes(lm.passes) for name, lm in models.items() if name != "target")
    copies = drafter.copies if isinstance(drafter, CoLocatedDrafter) else (drafter,)
    draft += sum(copy.passes() for copy in copies if isinstance(copy, RemoteDrafter))
    return {"target": decoding_passes(models["target"].passes), "draft": draft}


def of_sides(answers: Sequence[Sides | None]) -> dict[str, Any] | None:
    """Totals of both sides in all answers of a method; None if it does not draft ahead.

    Returns:
        `forwards` of each side, summed; medians in milliseconds of a round (from one pass of the target to the next),
        a pass of the target, a window of the draft, the time from request to start of a window (`transport`), and the
        rest of a round beside the longer side; and of each side the share of the time in which it worked.
    """
    recorded = [sides for sides in answers if sides is not None]
    timed = [sides for sides in recorded if len(sides.target) > 1]
    if not timed:
        return None

    def length(spans: Sequence[Span]) -> list[float]:
        return [span.ended_s - span.began_s for span in spans]

    rounds, targets, drafts, transports, busy = [], [], [], [], {"target": 0.0, "draft": 0.0}
    for sides in timed:
        rounds += [b.began_s - a.began_s for a, b in zip(sides.target, sides.target[1:], strict=False)]
        targets += length(sides.target)
        drafts += length(sides.draft)
        transports += [span.began_s - span.asked_s for span in sides.draft]
        begin_s, end_s = sides.target[0].began_s, sides.target[-1].began_s
        for side, spans in (("target", sides.target), ("draft", sides.draft)):
            within = (min(span.ended_s, end_s) - max(span.began_s, begin_s) for span in spans)
            busy[side] += sum(max(seconds, 0.0) for seconds in within)
    medians = {
        name: 1e3 * statistics.median(values)
        for name, values in (("round", rounds), ("target", targets), ("draft", drafts), ("transport", transports))
    }
    return {
        "forwards": {side: sum(sides.forwards[side] for sides in recorded) for side in busy},
        "median_ms": medians | {"rest": medians["round"] - max(medians["target"], medians["draft"])},
        "busy": {side: seconds / sum(rounds) for side, seconds in busy.items()},
    }

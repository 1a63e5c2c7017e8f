"""Speculative decoding, one round after the other: propose, forward, verify, commit.

This is the loop to read first. In every round the drafter guesses a few tokens, the target reads
the last committed token and all guesses in one pass, `verify` keeps the guesses that the target
would have produced itself and adds one token of the target's, and both sides go back to the
committed text. With an empty draft a round is plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

from paradraft.core import Drafter, Prompt, Step
from paradraft.decode.lengths import LengthPolicy
from paradraft.decode.stats import Clock
from paradraft.decode.stops import Stops
from paradraft.models.target import Target
from paradraft.verify.match import verify


def decode(
    target: Target, drafter: Drafter, prompt: Prompt, *, stops: Stops, lengths: LengthPolicy, clock: Clock
) -> Iterator[Step]:
    """Yields the new tokens of every round until all rows have ended.

    Args:
        target: the model whose text this is.
        drafter: where the guesses come from; it changes the speed, never the text.
        prompt: the prompts and how to sample.
        stops: where each row ends.
        lengths: how many tokens to draft in the next round.
        clock: takes the time of each part.

    Raises:
        ValueError: a prompt is longer than the model's capacity, or another request was started on
            this target before all rows had ended.
    """
    target.prefill(prompt)
    request = target.request
    clock.lap("prefill")
    drafter.start(prompt, None)
    clock.lap("draft")
    while not stops.all_finished:
        if target.request != request:
            raise ValueError("another answer was started on this engine: finish one stream before the next")
        draft = drafter.propose(min(lengths.next(), stops.room - 1))
        clock.lap("draft")
        out = target.forward(draft)
        verdict = verify(draft, out, target.root_positions, prompt.sampling)
        clock.lap("verify")
        target.commit(verdict)
        drafter.commit(verdict, out)
        step = stops.cut(draft, verdict)
        lengths.observe(step)
        clock.count(step)
        clock.lap("other")
        yield step
        clock.skip()

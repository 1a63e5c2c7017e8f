"""Speculative decoding, one round after the other: propose, forward, verify, commit.

This is the loop to read first. In every round the drafter guesses a few tokens, the target reads
the last committed token and all guesses in one pass, `verify` keeps the guesses that the target
would have produced itself and adds one token of the target's, and both sides go back to the
committed text. With an empty draft a round is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paradraft.core import Draft, Drafter, Prompt, RoundOutput, TargetOut, Verdict
from paradraft.decode.draft_length import LengthPolicy
from paradraft.decode.generation import Stops
from paradraft.decode.stats import Clock
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.verify import match, rejection

Verify = Callable[[Draft, TargetOut, Sampler], Verdict]
VERIFY: dict[str, Verify] = {"match": match.verify, "rejection": rejection.verify}


def decode(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    verify: Verify,
    *,
    stops: Stops,
    lengths: LengthPolicy,
    clock: Clock,
) -> Iterator[RoundOutput]:
    """Yields the new tokens of every round until all rows have ended.

    Args:
        target: the model whose text this is.
        drafter: where the guesses come from; it changes the speed, never the text.
        prompt: the prompts, how to sample, and the shape of the drafts.
        verify: `VERIFY[prompt.rule]`.
        stops: where each row ends.
        lengths: how many tokens to draft in the next round.
        clock: takes the time of each part.

    Raises:
        ValueError: a prompt is longer than the model's capacity, or another request was started on
            this target before all rows had ended.
    """
    prompt = replace(prompt, eos_ids=stops.eos_ids, limits=stops.limits)
    sampler = Sampler(prompt)
    lengths.start(len(prompt.tokens))
    drafter.start(prompt, None)
    target.prefill(prompt)
    request = target.request
    clock.lap("prefill")
    while not stops.all_finished:
        if target.request != request:
            raise ValueError("another answer was started on this engine: finish one stream before the next")
        draft = drafter.propose(stops.worth(lengths.next(), prompt.tree))
        draft = stops.limit(lengths.cut(draft))
        clock.lap("draft")
        out = target.forward(draft)
        verdict = verify(draft, out, sampler)
        clock.lap("verify")
        target.commit(verdict)
        drafter.commit(verdict, out)
        sampler.commit(verdict)
        step = stops.cut(draft, verdict)
        lengths.observe(step, draft_s=clock.last_s["draft"], verify_s=clock.last_s["verify"])
        if (rows := stops.leave(at_least=target.fewest_rows)) is not None:
            for part in (target, drafter, sampler, lengths):
                part.keep_rows(rows)
        clock.count(step)
        clock.lap("other")
        yield step
        clock.skip()

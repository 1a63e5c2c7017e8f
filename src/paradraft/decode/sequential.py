"""Speculative decoding, one round after the other: propose, forward, verify, commit.

This is the file to read first. In every round the drafter guesses a few tokens, the target reads the last committed
token and all guesses in one pass, `verify` keeps the guesses that the target would have produced itself and adds one
token of the target's, and both sides go back to the committed text. With an empty draft a round is plain decoding.

Before a round requests may join the batch, and after it those that have ended leave it (`batch.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradraft.core import RoundOutput

if TYPE_CHECKING:
    from paradraft.decode.batch import Batch


def decode_round(batch: Batch) -> RoundOutput:
    """Runs one round: every row of the batch gets at least one token.

    Args:
        batch: its target and its drafter have the same committed tokens before the round and after it.

    Returns:
        The new tokens of each request, cut where its answer ends.
    """
    draft = batch.trim(batch.drafter.propose(batch.draft_lengths()))
    batch.clock.lap("draft")
    out = batch.target.forward(draft)
    verdict = batch.verify(draft, out, batch.sampler)
    logprobs = batch.logprobs(out, verdict)
    batch.clock.lap("verify")
    committed = batch.target.commit(verdict, out)
    batch.drafter.commit(committed)
    batch.sampler.commit(committed)
    return batch.emit(draft, verdict, logprobs)

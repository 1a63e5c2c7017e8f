"""Speculative decoding, one round at a time: propose, forward, verify, commit.

This is the file to read first. In every round the drafter guesses a few tokens, the target reads the last committed
token and all guesses in one pass, `verify` accepts the guesses that the target would have produced itself and adds one
token of the target's, and both models drop the rejected ones. With an empty draft a round is plain decoding.

Requests join the batch before a round, and leave it after one (`batch.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paradraft.decode.stats import RoundOutput

if TYPE_CHECKING:
    from paradraft.decode.batch import Batch


def decode_round(batch: Batch) -> RoundOutput:
    """Runs one round: every row of the batch gets at least one token.

    Target and drafter have the same committed tokens before the round and after it.
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

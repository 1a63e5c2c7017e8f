"""PEARL: draft and verify at the same time (Liu et al. 2024, Algorithm 2).

The drafter is a round ahead. While the target verifies a draft, the drafter goes on after it and guesses a *window* of
γ tokens, whose first one stands where the target adds a token of its own. If all of the draft is accepted and the
target's own token is the window's first, then this one is verified too, and the rest of the window is the next draft.
Otherwise the window is dropped, the next draft is empty, and the target adds one token while the drafter goes on
after the committed text. So the paper's two modes are one: *pre-verify* is the verification of an empty draft, and
*post-verify* that of the last window, both with the target's own token as the check of the window's first.

Algorithm 2, taken literally, is off by one: line 29 computes p after x_1 ... x_i and line 32 compares it with x_i. What
follows x_1 ... x_i is x_(i+1); the last of them is the first token of the new window, as here.

Rows of a batch are each in their mode. Text is never made of tokens that are not verified, and a window is no longer
than its row has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paradraft.core import Draft, Drafter, Request, RoundOutput, Verdict
from paradraft.decode.batch import Batch
from paradraft.decode.draft_length import Fixed
from paradraft.decode.generation import Generation
from paradraft.models.forward.cpu.threads import use_one_torch_thread
from paradraft.models.target import Target
from paradraft.tree import ABSENT

TIMED_ROUNDS = 6
"""Rounds at least in which the two sides are timed."""


def decode_round_ahead(batch: AheadBatch) -> RoundOutput:
    """Runs one round: every row of the batch gets at least one token.

    Args:
        batch: its target and its drafter have the same committed tokens before the round and after it.

    Returns:
        The new tokens of each request, cut where its answer ends.
    """
    draft = batch.ahead
    drafting = batch.begin_drafting()
    try:
        out = batch.target.forward(draft)
        verdict = batch.verify(draft, out, batch.sampler)
        batch.clock.lap("verify")
    finally:
        wait([drafting])
    window = drafting.result()
    batch.clock.lap("draft")  # as far as it was waited for
    committed = batch.target.commit(verdict, out)
    batch.drafter.commit(committed)
    batch.sampler.commit(committed)
    batch.ahead = draft_ahead(draft, verdict, window)
    return batch.emit(draft, verdict)


def draft_ahead(draft: Draft, verdict: Verdict, window: Draft) -> Draft:
    """The next draft: of rows in which all was right the rest of the window, of others nothing.

    Args:
        draft: the chain that was verified.
        verdict: on it.
        window: the chain that was drafted after it.

    >>> verdict = Verdict.of(draft := Draft.chain(torch.tensor([[5, 6]])), torch.tensor([[0, 1]]), torch.tensor([7]))
    >>> draft_ahead(draft, verdict, Draft.chain(torch.tensor([[7, 8, 9]]))).tokens.tolist()
    [[8, 9]]
    >>> draft_ahead(draft, verdict, Draft.chain(torch.tensor([[4, 8, 9]]))).tokens.tolist()
    [[]]
    """
    if not window.tokens.shape[1]:
        return window
    is_all_B = verdict.accepted == (draft.tokens != ABSENT).sum(1)
    own_B = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
    is_right_B1 = (is_all_B & (own_B == window.tokens[:, 0]))[:, None]
    rest = Draft.chain(window.tokens[:, 1:])
    return rest.where(is_right_B1 & (rest.tokens != ABSENT))


class AheadBatch(Batch):
    """The rows of a batch whose drafter is a round ahead. The arguments are those of `Batch`; drafts are chains.

    `lengths` says γ. The drafter works in a thread of its own, so that models that compute outside of Python, as all
    of ours do, compute at the same time.
    """

    def __init__(self, target: Target, drafter: Drafter, **settings: Any) -> None:
        super().__init__(target, drafter, **settings)
        self.ahead = Draft.empty(0, target.device)
        """The draft that the next round verifies."""
        is_native = all(lm.is_native for lm in (target.lm, *drafter.models))
        # Else its first operation starts threads that spin on the CPUs that the passes need; see `one_torch_thread`.
        prepare = use_one_torch_thread if is_native else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drafter", initializer=prepare)

    def begin_drafting(self) -> Future[Draft]:
        """Has the drafter go on after the draft, for rows in which that can be of use."""
        known = (self.ahead.tokens != ABSENT).sum(1).tolist()
        lengths = [
            # The window's last token is followed by one of the target's. A window of one token tells nothing new.
            wanted if (wanted := min(length, generation.room - 1 - number)) > 1 else 0
            for length, generation, number in zip(self.lengths.next(), self.generations, known, strict=True)
        ]
        return self._pool.submit(self._draft, lengths, self.ahead)

    def _draft(self, lengths: list[int], after: Draft) -> Draft:
        window = self.drafter.propose(lengths, after)
        is_wanted_BN = torch.arange(window.tokens.shape[1])[None] < torch.tensor(lengths)[:, None]
        return window.where(is_wanted_BN.to(window.tokens.device) & (window.tokens != ABSENT))

    def round(self) -> RoundOutput:
        """See `Batch`."""
        return decode_round_ahead(self)

    def join(self, generations: Sequence[Generation]) -> None:
        """See `Batch`; rows begin with an empty draft."""
        before = len(self.generations)
        super().join(generations)
        known = self.ahead.tokens if before else Draft.empty(0, self.target.device).tokens
        self.ahead = Draft.chain(torch.nn.functional.pad(known, (0, 0, 0, len(generations)), value=ABSENT))

    def keep(self, rows_b: Tensor) -> None:
        """See `Batch`."""
        super().keep(rows_b)
        self.ahead = Draft.chain(self.ahead.tokens[rows_b.to(self.ahead.tokens.device)])

    def clear(self) -> None:
        """See `Batch`."""
        super().clear()
        self.ahead = Draft.empty(0, self.target.device)


def best_gamma(target: Target, drafter: Drafter, most: int) -> int:
    """γ with which neither side waits for the other: T_target / T_draft (section 4.4.1), from 2 to `most`.

    T_target is the time of a pass over a draft, T_draft that of a drafted token, each side alone. So a drafter whose
    tokens cost nothing one by one, such as PARD, is given as many as it may draft.
    """
    batch = Batch(target, drafter, lengths=Fixed(most))
    tokens = min((most + 1) * TIMED_ROUNDS, target.capacity - 2)
    batch.join([Generation(Request(id=0, tokens=[0, 0], max_new_tokens=tokens))])
    drafts_s, verifies_s = [], []
    while not batch.is_finished:
        output = batch.step()
        if output.drafted == [most]:
            drafts_s.append(batch.clock.last_s["draft"] / most)
            verifies_s.append(batch.clock.last_s["verify"])
    if not drafts_s:
        return most
    return min(max(round(median(verifies_s) / median(drafts_s)), 2), most)

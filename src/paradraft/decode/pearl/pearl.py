"""PEARL: drafts and verifies at the same time (Liu et al. 2024, Algorithm 2).

The drafter is a round ahead. While the target verifies a draft, the drafter drafts a *window* of γ tokens after it. The
first token of the window is at the position of the target's recovered or bonus token. If the whole draft is accepted
and the bonus token equals the first of the window, then that one is verified too, and the rest of the window is the
next draft. Otherwise the window is dropped, the next draft is empty, and the target adds one token while the drafter
drafts after the committed text. So the paper's two modes are one: *pre-verify* is the verification of an empty draft,
and *post-verify* that of the last window, both with the target's own token as the check of the window's first.

Algorithm 2, taken literally, is off by one: line 29 computes p after x_1 ... x_i and line 32 compares it with x_i. The
token after x_1 ... x_i is x_(i+1); the last of them is the first token of the new window, as here.

Each row of a batch has its own mode. Only verified tokens become text, and a window is never longer than the rest of
its answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Draft, Drafter, Request, TargetOut, Verdict
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.pearl.remote import RemoteDrafter, Span
from paradraft.decode.prefill import Prefilled
from paradraft.decode.stats import RoundOutput
from paradraft.models.forward.cpu.threads import use_one_torch_thread
from paradraft.models.target import Target
from paradraft.ragged import from_lists, to_lists
from paradraft.tree import ABSENT

TIMED_ROUNDS = 6
"""Fewest rounds in which the two sides are timed."""
MOST_SPANS = 4096
"""Number of passes and windows whose time spans a batch keeps."""


def decode_round_ahead(batch: AheadBatch) -> RoundOutput:
    """Runs one round: every row of the batch gets at least one token.

    Target and drafter have the same committed tokens before the round and after it.
    """
    batch.draft_first()
    draft = batch.ahead
    batch.begin_drafting()
    try:
        out = batch.forward(draft)
        verdict = batch.verify(draft, out, batch.sampler)
        batch.clock.lap("verify")
    except BaseException:
        with suppress(Exception):
            batch.take_window()  # so that the drafter is idle again
        raise
    window = batch.take_window()
    batch.clock.lap("draft")  # only the time spent waiting
    verdict = batch.settle(verdict, window)
    committed = batch.target.commit(verdict, out)
    batch.drafter.commit(committed)
    batch.sampler.commit(committed)
    batch.ahead = draft_ahead(draft, verdict, window)
    return batch.emit(draft, verdict)


def draft_ahead(draft: Draft, verdict: Verdict, window: Draft) -> Draft:
    """The next draft: the rest of the window in rows where draft and bonus token were right, nothing in others.

    >>> verdict = Verdict.of(draft := Draft.chain(torch.tensor([[5, 6]])), [[0, 1]], [7])
    >>> draft_ahead(draft, verdict, Draft.chain(torch.tensor([[7, 8, 9]]))).tokens.tolist()
    [[8, 9]]
    >>> draft_ahead(draft, verdict, Draft.chain(torch.tensor([[4, 8, 9]]))).tokens.tolist()
    [[]]
    """
    rows = zip(to_lists(draft.tokens), verdict.paths, verdict.tokens, to_lists(window.tokens), strict=True)
    rest = [
        following[1:] if len(path) == len(guesses) and following[:1] == tokens[-1:] else []
        for guesses, path, tokens, following in rows
    ]
    return Draft.chain(from_lists(rest, draft.tokens.device))


class DrafterThread:
    """Runs a drafter in a thread, on a GPU in a separate stream; it belongs to the thread from `begin` to `take`."""

    def __init__(self, drafter: Drafter, device: torch.device, *, is_native: bool) -> None:
        self._drafter = drafter
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Otherwise torch's first operation starts threads that spin on the CPUs of the passes; see `one_torch_thread`.
        prepare = use_one_torch_thread if is_native else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drafter", initializer=prepare)
        self._drafting: Future[tuple[Draft, Span]] | None = None

    def begin(self, lengths: Sequence[int], after: Draft | None) -> None:
        """See `RemoteDrafter`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._drafting = self._pool.submit(self._draft, lengths, after, time.perf_counter())

    def take(self) -> Draft:
        """See `RemoteDrafter`."""
        assert self._drafting is not None
        draft, self.last_span = self._drafting.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return draft

    def rest(self) -> None:
        """Waits until the thread is idle: a caller may have been interrupted between `begin` and `take`."""
        if self._drafting is not None:
            wait([self._drafting])

    def _draft(self, lengths: Sequence[int], after: Draft | None, asked_s: float) -> tuple[Draft, Span]:
        began_s = time.perf_counter()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            draft = self._drafter.propose(lengths, after)
        return draft, Span(side="draft", began_s=began_s, ended_s=time.perf_counter(), asked_s=asked_s)


class AheadBatch(Batch):
    """A batch whose drafter is a round ahead; drafts are chains, and `lengths` decides γ.

    The drafter runs in a separate thread, unless it is in another process.
    """

    def __init__(self, target: Target, drafter: Drafter, *, overlap: str = "both", **settings: Any) -> None:
        super().__init__(target, drafter, **settings)
        self.ahead = Draft.empty(0, target.device)
        """The draft that the next round verifies."""
        self.first_depths: list[int] = []
        """By row, the index in its window, counted from 1, of the first token of `ahead`."""
        self._overlap = overlap
        self.spans = deque[Span](maxlen=MOST_SPANS)
        """Time spans of both sides' work in the last rounds."""
        is_native = all(lm.is_native for lm in (target.lm, *drafter.models))
        self._side = (
            drafter
            if isinstance(drafter, RemoteDrafter)
            else DrafterThread(drafter, target.device, is_native=is_native)
        )

    def _start(self) -> None:
        self._side.rest()
        super()._start()
        self.spans.clear()

    def draft_first(self) -> None:
        """Without pre-verify, drafts for rows without a draft while the target waits."""
        self.first_depths = [2] * len(self.generations)
        if self._overlap != "post":
            return
        is_none = [not row for row in to_lists(self.ahead.tokens)]
        if not any(is_none):
            return
        self.first_depths = [1 if none else 2 for none in is_none]
        rooms = [max(generation.room - 1, 0) for generation in self.generations]
        rows = zip(self.lengths.next(), rooms, is_none, strict=True)
        self._wanted = [min(length, room) * none for length, room, none in rows]
        self._side.begin(self._wanted, Draft.empty(len(is_none), self.target.device))
        window = self.take_window()
        self.clock.lap("draft")
        self.drafter.commit(Committed(tokens=[[] for _ in is_none]))  # rolls back to the committed text
        tokens = ragged.joined(to_lists(self.ahead.tokens), to_lists(window.tokens))
        self.ahead = Draft.chain(from_lists(tokens, self.target.device))

    def begin_drafting(self) -> None:
        """Starts drafting the window after the draft, in rows that can use it."""
        known, is_pre = (self.ahead.tokens != ABSENT).sum(1).tolist(), self._overlap == "pre"
        self._wanted = [
            # The target adds a token after the window. A window of one token is useless: the target draws it itself.
            wanted
            if (wanted := min(length, generation.room - 1 - length_ahead)) > 1 and not (length_ahead and is_pre)
            else 0
            for length, generation, length_ahead in zip(self.lengths.next(), self.generations, known, strict=True)
        ]
        self._side.begin(self._wanted, self.ahead)

    def take_window(self) -> Draft:
        """Waits for the window, cut to the requested lengths."""
        window = self._side.take()
        if any(self._wanted):
            self.spans.append(self._side.last_span)
        if window.tokens.shape[1] <= min(self._wanted):
            return window
        is_wanted_BN = torch.arange(window.tokens.shape[1])[None] < torch.tensor(self._wanted)[:, None]
        return window.where(is_wanted_BN.to(window.tokens.device) & (window.tokens != ABSENT))

    def forward(self, draft: Draft) -> TargetOut:
        """The target's pass over a draft."""
        began_s = time.perf_counter()
        out = self.target.forward(draft)
        self.spans.append(Span(side="target", began_s=began_s, ended_s=time.perf_counter(), asked_s=began_s))
        return out

    def settle(self, verdict: Verdict, window: Draft) -> Verdict:
        """Returns the verdict unchanged; a hook for simulated verdicts, which need the window."""
        return verdict

    def round(self) -> RoundOutput:
        """See `Batch`."""
        return decode_round_ahead(self)

    def _admit(self, prefilled: Prefilled) -> None:
        """Adds rows with an empty draft."""
        before = len(self.generations)
        super()._admit(prefilled)
        known = self.ahead.tokens if before else Draft.empty(0, self.target.device).tokens
        self.ahead = Draft.chain(torch.nn.functional.pad(known, (0, 0, 0, len(prefilled.generations)), value=ABSENT))

    def keep(self, rows_b: Tensor) -> None:
        """See `Batch`."""
        super().keep(rows_b)
        self.ahead = Draft.chain(self.ahead.tokens[rows_b.to(self.ahead.tokens.device)])

    def clear(self) -> None:
        """See `Batch`."""
        self._side.rest()
        super().clear()
        self.ahead = Draft.empty(0, self.target.device)


def best_gamma(target: Target, drafter: Drafter, most: int) -> int:
    """γ with which neither side waits for the other: T_target / T_draft (section 4.4.1), from 2 to `most`.

    T_target is the time of a pass over a draft, T_draft that of a drafted token, each side alone. So a drafter whose
    time does not depend on the number of tokens, such as PARD, gets `most`.
    """
    batch = Batch(target, drafter, lengths=Fixed(most))
    if (tokens := min((most + 1) * TIMED_ROUNDS, target.capacity - 2)) < 1:
        raise ValueError(f"gamma=auto: capacity={target.capacity} is too small to measure it, give a number")
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

"""The requests that are decoded together, one row each: they join, take part in rounds, and leave.

A row's tokens do not depend on the rows beside it, nor on when it joined: every position has its own random numbers,
and the rows of a cache have lengths of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradraft.core import (
    INVALID,
    Committed,
    Draft,
    Drafter,
    Drafting,
    Request,
    RequestError,
    RoundOutput,
    TargetOut,
    Verdict,
)
from paradraft.decode.generation import NOT_NUMBERS, Generation
from paradraft.decode.lengths.draft_length import LengthPolicy
from paradraft.decode.logprobs import TokenLogprobs, logprobs_of
from paradraft.decode.reading_pace import ReadingPace
from paradraft.decode.sequential import decode_round
from paradraft.decode.stats import Clock
from paradraft.models.causal_lm import SavedRow
from paradraft.models.target import Target
from paradraft.parents import depths
from paradraft.ragged import upload
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, Tree
from paradraft.verify import load_rule, rule_name
from paradraft.verify.rules import Verify


@dataclass(frozen=True, kw_only=True)
class KeptRow:
    """What is kept of a request that has left, for one whose prompt begins with the same tokens.

    Args:
        tokens: its prompt and its answer.
        target: what the target's cache held of it.
        drafter: what the drafter saved of it.
    """

    tokens: list[int]
    target: SavedRow
    drafter: Any


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A request whose prompt is read in pieces, between the rounds of others.

    Args:
        generation: the request.
        begun: the kept row that its prompt begins with, and how many tokens the two have in common.
    """

    generation: Generation
    begun: tuple[KeptRow, int] | None


class Batch:
    """The rows that a target and a drafter decode together.

    One batch at a time may have rows on a target: its cache is the batch's.

    Args:
        target: the model whose text this is.
        drafter: where the guesses come from; it changes the speed, never the text.
        lengths: how many tokens to draft in the next round.
        rule: see `paradraft.verify.load_rule`.
        tree: the shape of the drafts; None for chains.
        verify: decides instead of the rule, for audits and timing.
        keeps_finished: let requests that have ended stay, so that the number of rows is constant.
        kept_rows: of how many requests, the last to end, the caches are kept: a prompt that begins as one of them, such
            as the next turn of a conversation, is read from where they part.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        lengths: LengthPolicy,
        rule: str = "match",
        tree: Tree | None = None,
        verify: Verify | None = None,
        keeps_finished: bool = False,
        kept_rows: int = 0,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.lengths = lengths
        self.drafting = Drafting(rule=rule_name(rule), tree=tree, wants_confidence=lengths.wants_confidence)
        self.verify = verify or load_rule(rule)
        self.generations: list[Generation] = []
        """By row."""
        self.reading: Reading | None = None
        """Has a row in the target's cache, after the others, and takes part in rounds as soon as its prompt is read."""
        self.pace = ReadingPace()
        """How much may be read between two rounds."""
        self.clock = Clock.on(target.device)
        """Times and counts since the batch was last without rows."""
        self._keeps_finished = keeps_finished
        self._kept = deque[KeptRow](maxlen=kept_rows)
        self._start_number = 0
        self._most: list[int] = []

    @property
    def members(self) -> list[Generation]:
        """All requests: by row, and last the one whose prompt is read in pieces."""
        return self.generations + ([self.reading.generation] if self.reading is not None else [])

    @property
    def is_current(self) -> bool:
        """Whether no other batch has been started on this target since this one was."""
        return self.target.starts == self._start_number

    @property
    def is_finished(self) -> bool:
        """Whether no row needs another round."""
        return all(generation.is_finished for generation in self.generations)

    def join(self, generations: Sequence[Generation]) -> None:
        """Adds requests, one row each, after the others; the target reads their prompts.

        Args:
            generations: may have tokens already, of an earlier batch: the answer goes on after them.

        Raises:
            ValueError: a prompt is longer than the target's capacity, or the caches do not fit into memory.
        """
        assert self.reading is None, "a prompt is read in pieces"
        if not self.generations:
            self._start()
        self.clock.skip()
        requests = [generation.so_far for generation in generations]
        self.clock.join(request.id for request in requests)
        begun = [self._begun(request.tokens) for request in requests]
        prompt = self.target.join(requests, [found and (found[0].target, found[1]) for found in begun])
        self._admit(generations, requests, prompt, begun)
        self.clock.lap("prefill")
        unread = sum(_unread(request.tokens, found) for request, found in zip(requests, begun, strict=True))
        self.pace.read(unread, self.clock.last_s["prefill"])

    def _admit(
        self,
        generations: Sequence[Generation],
        requests: Sequence[Request],
        prompt: Committed,
        begun: Sequence[tuple[KeptRow, int] | None],
    ) -> None:
        """Lets requests take part in rounds from now on, whose prompts the target has read."""
        self.drafter.join(requests, prompt)
        for row, found in enumerate(begun, start=len(self.generations)):
            if found is not None:
                self.drafter.restore(row, found[0].drafter, found[1])
        self.sampler.join(requests)
        self.lengths.join(requests)
        self.generations += generations

    def begin(self, generation: Generation) -> None:
        """Adds one request whose prompt `read` reads in pieces, beside others that go on; none joins until it is read.

        Args:
            generation: see `join`.

        Raises:
            ValueError: see `join`.
        """
        assert self.generations and self.reading is None
        request = generation.so_far
        self.clock.join([request.id])
        found = self._begun(request.tokens)
        self.target.begin(request, found and (found[0].target, found[1]))
        self.reading = Reading(generation=generation, begun=found)

    def read(self, most: int) -> int:
        """Reads at most `most` tokens of the prompt that is read in pieces; the request takes part in rounds from now
        on when that was its last piece.

        Returns:
            How many were read.

        Raises:
            RequestError: with the error that `join` would raise.
        """
        assert self.reading is not None
        generation, begun = self.reading.generation, self.reading.begun
        self.clock.skip()
        try:
            tokens, prompt = self.target.read(most)
            if prompt is not None:
                self._admit([generation], [generation.so_far], prompt, [begun])
                self.reading = None
        except Exception as error:
            raise RequestError([generation.request.id], error) from error
        self.clock.lap("prefill")
        self.pace.read(tokens, self.clock.last_s["prefill"])
        return tokens

    def unread(self, request: Request) -> int:
        """How many tokens have to be read of a prompt."""
        return _unread(request.tokens, self._begun(request.tokens))

    def _begun(self, tokens: list[int]) -> tuple[KeptRow, int] | None:
        """The kept row that has the most of a prompt's first tokens, and how many; None if none has any."""
        if not self._kept:
            return None
        shared = [shared_length(kept.tokens, tokens) for kept in self._kept]
        best = max(range(len(shared)), key=shared.__getitem__)
        return (self._kept[best], shared[best]) if shared[best] else None

    def _save(self, gone: Collection[Generation]) -> None:
        """Keeps the caches of requests that have ended."""
        if not self._kept.maxlen:
            return
        for row, generation in enumerate(self.generations):
            if generation in gone and generation.is_finished and generation.error is None:
                tokens = generation.request.tokens + generation.tokens
                target, drafter = self.target.lm.save(row, len(tokens)), self.drafter.save(row, len(tokens))
                self._kept.append(KeptRow(tokens=tokens, target=target, drafter=drafter))

    def _start(self) -> None:
        device = self.target.device
        drafter = self.drafter
        self.target.start(drafter.reserved_tokens, drafter.hidden_layers, drafter.prompt_hidden_layers)
        self._start_number = self.target.starts
        self.drafter.start(self.drafting, device)
        self.sampler = Sampler(drafting=self.drafting, device=device, faster=self.target.lm.draw)
        self.lengths.start(self.drafting.tree, is_ragged=self.target.lm.is_ragged)
        self.clock = Clock.on(device)

    def step(self) -> RoundOutput:
        """Runs one round; then requests that have ended leave, as soon as that pays."""
        if not self.is_current:
            raise ValueError("another batch was started on this target: finish one before the next")
        if self.is_finished and self.reading is not None:
            # Not at the end of the round before: its tokens, the last of their answers, would be told after it.
            self.read(self.target.capacity)
        self.clock.skip()
        output = self.round()
        seconds = self.clock.last_s
        other_s = seconds.get("other", 0.0)  # of the round before
        self.lengths.observe(output, draft_s=seconds.get("draft", 0.0), verify_s=seconds["verify"], other_s=other_s)
        self.pace.decode(seconds.get("draft", 0.0) + seconds["verify"] + other_s)
        self.clock.count(output)
        if self.is_finished and self.reading is None:
            self._save(self.generations)
            self.clear()
        elif not (self.is_finished or self._keeps_finished):
            finished = [generation for generation in self.generations if generation.is_finished]
            if should_compact(len(finished), len(self.generations)):
                self.leave(finished)
        self.clock.lap("other")
        return output

    def round(self) -> RoundOutput:
        """One round of the loop that this batch is decoded with."""
        return decode_round(self)

    def leave(self, generations: Collection[Generation]) -> None:
        """Removes requests, ended or not, from the batch. The last rows take the places of those that leave."""
        gone = set(map(id, generations))
        if self.reading is not None and id(self.reading.generation) in gone:
            self.reading = None
            self.target.give_up()
            if self.is_finished:  # the rows were kept for it
                gone.update(map(id, self.generations))
        if self.reading is not None and gone.issuperset(map(id, self.generations)):
            self.read(self.target.capacity)
        holes = [row for row, generation in enumerate(self.generations) if id(generation) in gone]
        least = min(self.target.fewest_rows, len(self.generations))
        holes = holes[: len(self.generations) - least] if len(holes) < len(self.generations) else holes
        self._save([self.generations[row] for row in holes])
        if len(holes) == len(self.generations):
            self.clear()
        elif holes:
            rows = rows_without(holes, len(self.generations))
            self.keep(torch.tensor(rows))
            self.generations = [self.generations[row] for row in rows]

    def keep(self, rows_b: Tensor) -> None:
        """Forgets all rows but some, `[b]` the index that each had before, and orders these anew."""
        for part in (self.target, self.drafter, self.sampler, self.lengths):
            part.keep(rows_b)

    def clear(self) -> None:
        """Removes all requests."""
        self.generations, self.reading = [], None

    def draft_lengths(self) -> list[int]:
        """How deep to draft in each row: no deeper than it has room for, with the target's own token after the draft.

        A tree that grows to its budget takes another shape if it is shallower, so it is drafted whole and cut later.
        """
        pairs = zip(self.lengths.next(), self.generations, strict=True)
        self._most = [min(length, generation.draftable) for length, generation in pairs]
        tree = self.drafting.tree
        is_grown = tree is not None and tree.budget is not None
        return [self.lengths.k if most else 0 for most in self._most] if is_grown else self._most

    def trim(self, draft: Draft) -> Draft:
        """The draft without what is not worth its time, and without what is deeper than its row may draft."""
        draft = self.lengths.cut(draft)
        if draft.tokens.shape[1] <= min(self._most):
            return draft
        is_kept_BN = depths(draft.parents) < upload(self._most, draft.tokens.device)[:, None]
        return draft if is_kept_BN.all() else draft.where(is_kept_BN)

    def logprobs(self, out: TargetOut, verdict: Verdict) -> dict[int, list[TokenLogprobs]]:
        """How likely the target finds the committed tokens of a round, by request, of those that ask for it."""
        found = {}
        for row, generation in enumerate(self.generations):
            if (most := generation.request.logprobs) is None or generation.is_finished:
                continue
            kept = int(verdict.accepted[row])
            tokens = [token for token in verdict.tokens[row, : kept + 1].tolist() if token >= 0]
            places = [0, *(node + 1 for node in verdict.path[row, :kept].tolist())][: len(tokens)]
            found[generation.request.id] = logprobs_of(out.logits[row, places], tokens, most)
        return found

    def emit(
        self, draft: Draft, verdict: Verdict, logprobs: Mapping[int, list[TokenLogprobs]] | None = None
    ) -> RoundOutput:
        """Hands the committed tokens of a round to the requests; a request whose logits are not numbers fails."""
        told = logprobs or {}
        tokens, accepted, drafted, nodes, paths = [], [], [], [], []
        parts = (verdict.tokens, verdict.accepted, verdict.path, draft.tokens, draft.parents)
        rows = zip(self.generations, *(part.tolist() for part in parts), strict=True)
        for generation, committed, kept, path, guessed, parents in rows:
            depth = [] if generation.is_finished else depths_of_row(guessed, parents)
            new = generation.emit(
                [token for token in committed if token != ABSENT],
                kept,
                drafted=sum(map(bool, depth)),
                logprobs=told.get(generation.request.id, ()),
            )
            # Deeper in the draft a processor may have forbidden every token, after a guess that does not become text.
            if new and any(token == INVALID and parent < 0 for token, parent in zip(guessed, parents, strict=True)):
                generation.fail(ValueError(NOT_NUMBERS.format(model="draft model")))
            tokens.append(new)
            accepted.append(min(kept, len(new)))
            drafted.append(max(depth, default=0))
            nodes.append(sum(map(bool, depth)))
            paths.append(path[: accepted[-1]])
        return RoundOutput(
            requests=[generation.request.id for generation in self.generations],
            tokens=tokens,
            accepted=accepted,
            drafted=drafted,
            nodes=nodes,
            paths=paths,
            finished=[generation.is_finished for generation in self.generations],
        )


def _unread(tokens: Sequence[int], begun: tuple[KeptRow, int] | None) -> int:
    return max(len(tokens) - 1 - (0 if begun is None else begun[1]), 0)


def run(batch: Batch, generations: Sequence[Generation]) -> Iterator[RoundOutput]:
    """Decodes requests together, from the first round to the last.

    Raises:
        ValueError: see `Batch.join`, or the logits of a model are not numbers where a token was to be chosen.
    """
    try:
        batch.join(generations)
    except RequestError as error:
        raise error.cause from None
    while not batch.is_finished:
        try:
            output = batch.step()
        except RequestError as error:
            raise error.cause from None
        yield output
        for generation in generations:
            if generation.error is not None:
                batch.clear()
                raise generation.error


def depths_of_row(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """How deep each node of a row's draft is, from 1 on; 0 for one that is absent, and for what follows it.

    >>> depths_of_row([7, -1, 8, 9], [-1, 0, 1, 0])
    [1, 0, 0, 2]
    """
    deep: list[int] = []
    for token, parent in zip(tokens, parents, strict=True):
        is_there = token >= 0 and (parent < 0 or deep[parent] > 0)
        deep.append((deep[parent] if parent >= 0 else 0) + 1 if is_there else 0)
    return deep


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common, from the first.

    >>> shared_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def should_compact(finished: int, rows: int) -> bool:
    """Whether enough rows have ended to make moving others into their places worth its time.

    >>> should_compact(3, 16), should_compact(4, 16), should_compact(0, 2)
    (False, True, False)
    """
    return finished * 4 >= rows


def rows_without(holes: Collection[int], rows: int) -> list[int]:
    """Which row comes where when some leave: the last ones fill the holes, and all others stay where they are.

    >>> rows_without([1, 4], 5)
    [0, 3, 2]
    """
    gone = set(holes)
    staying = [row for row in range(rows) if row not in gone]
    last = staying[::-1]
    return [row if row not in gone else last.pop(0) for row in range(len(staying))]

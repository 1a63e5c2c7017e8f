"""Continuous batching: requests join, take part in rounds, and leave; one row each.

A row's tokens do not depend on the other rows, nor on when it joined: every position has its own random numbers, and
every row of the KV cache its own length.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paradraft.core import INVALID, Draft, Drafter, Drafting, RequestError, TargetOut, Verdict
from paradraft.decode.compaction import rows_without, should_compact
from paradraft.decode.generation import NOT_NUMBERS, Generation
from paradraft.decode.lengths.draft_length import LengthPolicy
from paradraft.decode.logprobs import TokenLogprobs, logprobs_of
from paradraft.decode.prefill import Prefill, Prefilled
from paradraft.decode.prefix_cache import CachedRow, PrefixCache
from paradraft.decode.sequential import decode_round
from paradraft.decode.stats import Clock, RoundOutput, RoundTime
from paradraft.models.forward import NotFiniteError
from paradraft.models.target import Target
from paradraft.parents import depths_of_row, logit_rows
from paradraft.ragged import upload
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree
from paradraft.verify import Verify, load_rule, rule_name

LEARNING = 32
"""Last rounds of a pause in which the drafter learns what the target thinks likely: the search takes time."""


class Batch:
    """The rows that a target and a drafter decode together.

    Only one batch at a time may have rows on a target, because the batch owns the target's KV cache.

    Args:
        target: the model whose text is generated.
        drafter: changes the speed, never the text.
        lengths: policy for the draft length of each round.
        rule: see `paradraft.verify.load_rule`.
        tree: the shape of the drafts; None for chains.
        verify: replaces the rule, for audits and timing.
        keeps_finished: finished requests stay, so that the number of rows is constant.
        kept_rows: number of finished requests whose caches are kept for prefix reuse, such as by the next turn of a
            conversation.
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
        self._rule = load_rule(rule)
        self.verify = verify or self._rule
        self.drafting = Drafting(
            rule=rule_name(rule),
            draws=self._rule.draws,
            tree=drafter.traits.shape(tree, lengths.k),
            wants_confidence=lengths.wants_confidence,
        )
        self.generations: list[Generation] = []
        """By row."""
        self._prefix_cache = PrefixCache(kept_rows)
        self.prefill = Prefill(target, self._prefix_cache)
        self.clock = Clock.on(target.device)
        """Times and counts since the batch was last empty."""
        self._keeps_finished = keeps_finished
        self._start_number = 0
        self._most: list[int] = []
        self._behind: dict[int, int] = {}
        """Rows whose draft model reads in this round and does not draft, with the number of their unread tokens."""
        self._along = 0

    @property
    def members(self) -> list[Generation]:
        """All requests by row; those in prefill come last."""
        return self.generations + self.prefill.generations

    @property
    def is_current(self) -> bool:
        """Whether no other batch has been started on this target since this one."""
        return self.target.starts == self._start_number

    @property
    def is_finished(self) -> bool:
        """Whether no row needs another round."""
        return all(generation.is_finished for generation in self.generations)

    def join(self, generations: Sequence[Generation]) -> None:
        """Adds requests as the last rows, after a prefill of their prompts; answers begun in another batch go on.

        Raises:
            ValueError: a prompt is longer than the target's capacity, or the caches do not fit into memory.
        """
        self.begin(generations)
        self.read(sys.maxsize)

    def begin(self, generations: Sequence[Generation]) -> None:
        """Adds requests whose prompts `read` reads; errors as in `join`."""
        if not self.members:
            self._start()
        self.clock.join(generation.request.id for generation in generations)
        self.prefill.begin(generations)

    def read(self, most: int) -> None:
        """Reads a piece of at most `most` tokens of the prompts in prefill; those that are read become rows."""
        self.clock.skip()
        with self._blaming(self.prefill.generations):
            tokens = self.prefill.read(most)
        self._admit_read()
        self.clock.lap("prefill")
        self.prefill.pace.add(0, tokens, seconds=self.clock.last_s["prefill"])
        self.lengths.learn_prefill(tokens, self.clock.last_s["prefill"])

    def read_along(self, most: int) -> None:
        """Lets the next round read a piece of at most `most` tokens of the prompts in prefill too."""
        self._along = most

    def _admit_read(self) -> None:
        """Makes rows of the requests whose prompts are read."""
        if (prefilled := self.prefill.admit()) is not None:
            with self._blaming(prefilled.generations):
                self._admit(prefilled)

    @contextmanager
    def _blaming(self, joining: list[Generation]) -> Iterator[None]:
        """Names the requests of an error: that of its row, or else all that join."""
        rows = self.generations + joining
        try:
            yield
        except RequestError:
            raise
        except NotFiniteError as error:
            raise RequestError([rows[error.row].request.id], error) from error
        except Exception as error:
            raise RequestError([generation.request.id for generation in joining], error) from error

    def _admit(self, prefilled: Prefilled) -> None:
        self.drafter.join(prefilled.requests, prefilled.prompt)
        for row, prefix in enumerate(prefilled.prefixes, start=len(self.generations)):
            if prefix is not None:
                self.drafter.restore(row, prefix.row.drafter, prefix.length)
        self.sampler.join(prefilled.requests)
        self.lengths.join(prefilled.requests)
        self.generations += prefilled.generations

    def _save(self, leaving: Collection[Generation]) -> None:
        if not self._prefix_cache.keeps_any:
            return
        for row, generation in enumerate(self.generations):
            if generation in leaving and generation.is_finished and generation.error is None:
                tokens = generation.request.tokens + generation.tokens
                target, drafter = self.target.lm.cache.save(row, len(tokens)), self.drafter.save(row, len(tokens))
                self._prefix_cache.add(CachedRow(tokens=tokens, target=target, drafter=drafter))

    def _start(self) -> None:
        device = self.target.device
        drafter = self.drafter
        self.target.start(
            drafter.reserved_tokens, drafter.hidden_layers, drafter.likeliest, of_rule=self._rule.hidden_layers
        )
        self._start_number = self.target.starts
        self.drafter.start(self.drafting, device)
        self.sampler = Sampler(drafting=self.drafting, device=device, faster=self.target.lm.sampling)
        self.lengths.start(self.drafting.tree, is_ragged=self.target.lm.is_ragged)
        self.clock = Clock.on(device)

    def step(self) -> RoundOutput:
        """Runs one round; then finished requests leave, when compaction pays."""
        if not self.is_current:
            raise ValueError("another batch was started on this target: finish one before the next")
        if self.is_finished and self.prefill.generations:
            # Not at the end of the previous round: its tokens, the last of their answers, would be delivered late.
            self.read(sys.maxsize)
        read = self.prefill.read_along(self._along) if self._along else 0
        self._along = 0
        self.clock.skip()
        output = self.round()
        seconds = self.clock.last_s
        # The rest was of the previous round.
        draft_s, other_s = (seconds.get(part, 0.0) for part in ("draft", "other"))
        time = RoundTime(draft_s=draft_s, verify_s=seconds["verify"], other_s=other_s)
        self.lengths.observe(output, None if read or self._behind else time)
        self.clock.count(output)
        rows = max(sum(map(bool, output.tokens)), 1)
        if read:
            self.prefill.pace.add(rows, read, seconds=time.total_s)
            self.clock.lap("other")
            self._admit_read()
            self.clock.lap("prefill")
        elif not self._behind:
            self.prefill.pace.add(rows, 0, seconds=time.total_s)
        if self.is_finished and not self.prefill.generations:
            self._save(self.generations)
            self.clear()
        elif not (self.is_finished or self._keeps_finished):
            finished = [generation for generation in self.generations if generation.is_finished]
            if should_compact(len(finished), len(self.generations)):
                self.leave(finished)
        self.clock.lap("other")
        return output

    def round(self) -> RoundOutput:
        """Runs one round of this batch's decoding loop."""
        return decode_round(self)

    def leave(self, generations: Collection[Generation]) -> None:
        """Removes requests, finished or not; the last rows fill the gaps (compaction).

        Where no row would be left, all stay as long as prompts are read: then one of these joins them.
        """
        gone = set(map(id, generations))
        if self.prefill.drop(gone) and not self.prefill.generations and all(row.is_over for row in self.generations):
            gone.update(map(id, self.generations))  # these rows stayed only for the prompts in prefill
        if self.prefill.generations and gone.issuperset(map(id, self.generations)):
            return
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
        """Drops and reorders rows: `[b]` the old index of each row."""
        for part in (self.target, self.drafter, self.sampler, self.lengths):
            part.keep(rows_b)

    def clear(self) -> None:
        """Removes all requests."""
        self.generations, self._along = [], 0
        self.prefill.clear()

    def draft_lengths(self) -> list[int]:
        """Largest draft depth of each row: the policy's, limited by the tokens that the answer may still get.

        A tree with a budget changes its shape if it is drafted shallower, so it is drafted whole and trimmed later.
        """
        lengths = self.lengths.next()
        worth = self.drafter.worth = self.lengths.worth
        self.target.likeliest = self.drafter.likeliest if worth.pause <= LEARNING else 0
        if not any(lengths):
            self._behind, self._most = {}, lengths
            return lengths
        self._behind = self._catch_up([row for row, length in enumerate(lengths) if length])
        self.lengths.postpone(self._behind)
        rows = enumerate(zip(lengths, self.generations, strict=True))
        self._most = [0 if row in self._behind else min(most, text.draftable) for row, (most, text) in rows]
        tree = self.drafting.tree
        is_grown = tree is not None and tree.budget is not None
        return [self.lengths.k if most else 0 for most in self._most] if is_grown else self._most

    def _catch_up(self, rows: list[int]) -> dict[int, int]:
        """Lets the drafter read a piece of a long text, where streams would wait for the whole, and where times may
        decide when a row drafts."""
        running = [text for text in self.generations if not text.is_over]
        if not self.lengths.runs_plain or len(running) < 2 or not any(text.is_watched for text in running):
            return {}
        return self.drafter.catch_up(rows, self.prefill.pace.most(len(running)))

    def trim(self, draft: Draft) -> Draft:
        """Removes nodes that the policy does not verify, and nodes below the largest depth of their row."""
        draft = self.lengths.cut(draft)
        if draft.tokens.shape[1] <= min(self._most):
            return draft
        rows = zip(*draft.lists, self._most, strict=True)
        are_kept = [[depth <= most for depth in depths_of_row(*row)] for *row, most in rows]
        return draft if all(map(all, are_kept)) else draft.where(upload(are_kept, draft.tokens.device) > 0)

    def logprobs(self, out: TargetOut, verdict: Verdict) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of the committed tokens of a round, by id, for requests with `logprobs`."""
        logprobs = {}
        for row, generation in enumerate(self.generations):
            if (most := generation.request.logprobs) is None or generation.is_finished:
                continue
            tokens = [token for token in verdict.tokens[row] if token >= 0]
            rows = logit_rows(verdict.paths[row])[: len(tokens)]
            logprobs[generation.request.id] = logprobs_of(out.logits[row, rows], tokens, most)
        return logprobs

    def emit(
        self, draft: Draft, verdict: Verdict, logprobs: Mapping[int, list[TokenLogprobs]] | None = None
    ) -> RoundOutput:
        """Appends the committed tokens to the requests; a request whose logits are not numbers fails."""
        logprobs_by_id = logprobs or {}
        tokens, accepted, drafted, nodes, paths = [], [], [], [], []
        rows = zip(self.generations, verdict.tokens, verdict.paths, *draft.lists, strict=True)
        for generation, committed, path, guesses, parents in rows:
            node_depths = [] if generation.is_finished else depths_of_row(guesses, parents)
            count, depth = sum(map(bool, node_depths)), max(node_depths, default=0)
            its = logprobs_by_id.get(generation.request.id, ())
            new = generation.emit(committed, len(path), drafted=count, depth=depth, logprobs=its)
            # Deeper nodes may be invalid: a processor may have forbidden every token after a rejected guess.
            if new and any(token == INVALID and parent < 0 for token, parent in zip(guesses, parents, strict=True)):
                generation.fail(ValueError(NOT_NUMBERS.format(model="draft model")))
            tokens.append(new)
            accepted.append(min(len(path), len(new)))
            drafted.append(depth)
            nodes.append(count)
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


def run(batch: Batch, generations: Sequence[Generation]) -> Iterator[RoundOutput]:
    """Decodes requests to the end; raises the errors of `Batch.join`, and ValueError if logits are not numbers."""
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

"""Rounds: what is proposed, what of it there is room for, and who takes part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.decode.batch import Batch
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.stats import RoundOutput
from paradraft.models.causal_lm import CausalLM
from paradraft.ragged import from_lists
from paradraft.sampling_params import Sampling
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import decoded, requests, target_of, texts


class Knowing(Drafter):
    """Drafts the right tokens, from answers that it was told; nothing for requests without an answer."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers

    def start(self, drafting: Drafting, device: torch.device) -> None:
        self.rows: list[list[int]] = []

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        self.rows += [self.answers[request.id][request.answered :] for request in requests]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        return Draft.chain(from_lists([row[:k] for row, k in zip(self.rows, lengths, strict=True)]))

    def commit(self, new: Committed) -> None:
        self.rows = [row[len(tokens) :] for row, tokens in zip(self.rows, new.tokens, strict=True)]

    def keep(self, rows: torch.Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]


def rounds(answers: list[list[int]], prompts: list[list[int]], *, new: int, capacity: int) -> list[RoundOutput]:
    lm = CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False, capacity=capacity, width=16)
    batch = Batch(target_of(lm), Knowing(answers), lengths=Fixed(8))
    return decoded(batch, requests(prompts, Sampling(temperature=1.0, seed=1), new))


def test_no_more_is_drafted_than_there_is_room() -> None:
    """Guards a K larger than the room left: the last draft is cut, and the capacity can be filled."""
    answer = texts(rounds([[]], [[1, 2, 3]], new=29, capacity=32))[0]
    steps = rounds([answer], [[1, 2, 3]], new=29, capacity=32)
    assert texts(steps) == {0: answer}
    assert [step.drafted for step in steps] == [[8], [8], [8], [1]]
    assert [step.accepted for step in steps] == [[8], [8], [8], [1]]


def test_a_finished_row_does_not_outgrow_the_cache() -> None:
    """Guards batches: the first of five rows ends after 4 rounds but is read on, 9 tokens a round, as one row is too
    few to leave; the others take 29 rounds."""
    prompts = [[1, 2, 3], [3, 2, 1], [4, 4, 4], [5, 5, 5], [6, 7, 8]]
    forever = texts(rounds([[]], prompts[:1], new=70, capacity=80))[0]
    plain = texts(rounds([[]] * 5, prompts, new=29, capacity=32))
    steps = rounds([forever, [], [], [], []], prompts, new=29, capacity=32)
    assert texts(steps) == plain
    assert [len(step.tokens[0]) for step in steps[:5]] == [9, 9, 9, 2, 0]


def test_rows_that_have_ended_leave_the_batch() -> None:
    """Guards throughput: rows that ended are not computed on, and those that stay keep their own text and number."""
    prompts = [[1, 2, 3], [3, 2, 1], [4, 4, 4]]
    plain = texts(rounds([[]] * 3, prompts, new=29, capacity=32))
    steps = rounds([plain[0], [], plain[2]], prompts, new=29, capacity=32)
    assert texts(steps) == plain
    assert [step.requests for step in steps] == [[0, 1, 2]] * 4 + [[1]] * 25

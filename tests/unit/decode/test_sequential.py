from __future__ import annotations

import torch

from paradraft.core import Draft, Prompt, RoundOutput, TargetOut, Verdict
from paradraft.decode.draft_length import Fixed
from paradraft.decode.generation import Stops
from paradraft.decode.sequential import decode
from paradraft.decode.stats import Clock
from paradraft.models.causal_lm import CausalLM
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from paradraft.verify.match import verify
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer


class Knowing:
    """Drafts the right tokens, from answers that it was told; nothing for rows without an answer."""

    needs_hidden = ()
    can_run_ahead = False
    can_branch = False
    can_branch_aside = False

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers
        self.asked: list[int] = []

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        self.done = [0] * len(self.answers)

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        self.asked.append(k)
        rows = [answer[done : done + k] for answer, done in zip(self.answers, self.done, strict=True)]
        return Draft.chain(torch.tensor([row + [ABSENT] * (k - len(row)) for row in rows]).view(len(rows), k).long())

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        self.done = [done + int((row != ABSENT).sum()) for done, row in zip(self.done, verdict.tokens, strict=True)]

    def keep_rows(self, rows: torch.Tensor) -> None:
        self.answers = [self.answers[row] for row in rows.tolist()]
        self.done = [self.done[row] for row in rows.tolist()]


def decoded(
    answers: list[list[int]], prompts: list[list[int]], *, new: int, capacity: int
) -> tuple[list[RoundOutput], Knowing]:
    lm = CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False, capacity=capacity, width=16)
    drafter = Knowing(answers)
    stops = Stops(limits=[new] * len(prompts), eos_ids=frozenset())
    prompt = Prompt(tokens=torch.tensor(prompts), sampling=(Sampling(temperature=1.0, seed=1),) * len(prompts))
    target = Target(lm, tiny_tokenizer())
    return list(decode(target, drafter, prompt, verify, stops=stops, lengths=Fixed(8), clock=Clock())), drafter


def texts(steps: list[RoundOutput]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in steps[0].rows]
    for step in steps:
        for row, tokens in zip(step.rows, step.tokens, strict=True):
            found[row] += tokens
    return found


def test_no_more_is_drafted_than_there_is_room() -> None:
    """Guards a K larger than the room left: the last draft is cut, and the capacity can be filled."""
    (answer,) = texts(decoded([[]], [[1, 2, 3]], new=29, capacity=32)[0])
    steps, _ = decoded([answer], [[1, 2, 3]], new=29, capacity=32)
    assert texts(steps) == [answer]
    assert [step.drafted for step in steps] == [[8], [8], [8], [1]]
    assert [step.accepted for step in steps] == [[8], [8], [8], [1]]


def test_a_finished_row_does_not_outgrow_the_cache() -> None:
    """Guards batches: the first of five rows ends after 4 rounds but is read on, 9 tokens a round, as one row is too
    few to leave; the others take 29 rounds."""
    prompts = [[1, 2, 3], [3, 2, 1], [4, 4, 4], [5, 5, 5], [6, 7, 8]]
    (forever,) = texts(decoded([[]], prompts[:1], new=70, capacity=80)[0])
    plain = texts(decoded([[]] * 5, prompts, new=29, capacity=32)[0])
    steps, _ = decoded([forever, [], [], [], []], prompts, new=29, capacity=32)
    assert texts(steps) == plain
    assert [len(step.tokens[0]) for step in steps[:5]] == [9, 9, 9, 2, 0]


def test_rows_that_have_ended_leave_the_batch() -> None:
    """Guards throughput: rows that ended are not computed on, and those that stay keep their own text and number."""
    prompts = [[1, 2, 3], [3, 2, 1], [4, 4, 4]]
    plain = texts(decoded([[]] * 3, prompts, new=29, capacity=32)[0])
    steps, _ = decoded([plain[0], [], plain[2]], prompts, new=29, capacity=32)
    assert texts(steps) == plain
    assert [step.rows for step in steps] == [[0, 1, 2]] * 4 + [[1]] * 25

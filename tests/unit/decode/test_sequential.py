from __future__ import annotations

import torch

from paradraft.core import ABSENT, Draft, Prompt, Sampling, Step, TargetOut, Verdict
from paradraft.decode.lengths import Fixed
from paradraft.decode.sequential import decode
from paradraft.decode.stats import Clock
from paradraft.decode.stops import Stops
from paradraft.models.causal_lm import CausalLM
from paradraft.models.target import Target
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer


class Knowing:
    """Drafts the right tokens, from answers that it was told; nothing for rows without an answer."""

    needs_hidden = ()
    can_run_ahead = False

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


def decoded(
    answers: list[list[int]], prompts: list[list[int]], *, new: int, capacity: int
) -> tuple[list[Step], Knowing]:
    lm = CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False, capacity=capacity, width=16)
    drafter = Knowing(answers)
    stops = Stops(batch_size=len(prompts), eos_ids=frozenset(), max_new_tokens=new)
    prompt = Prompt(tokens=torch.tensor(prompts), sampling=Sampling(temperature=1.0, seed=1))
    target = Target(lm, tiny_tokenizer())
    return list(decode(target, drafter, prompt, stops=stops, lengths=Fixed(k=8), clock=Clock())), drafter


def texts(steps: list[Step]) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens[row]] for row in range(len(steps[0].tokens))]


def test_no_more_is_drafted_than_there_is_room() -> None:
    """Guards a K larger than the room left: the last rounds draft less, and the capacity can be filled."""
    (answer,) = texts(decoded([[]], [[1, 2, 3]], new=29, capacity=32)[0])
    steps, drafter = decoded([answer], [[1, 2, 3]], new=29, capacity=32)
    assert texts(steps) == [answer]
    assert drafter.asked == [8, 8, 8, 1]
    assert [step.accepted for step in steps] == [[8], [8], [8], [1]]


def test_a_finished_row_does_not_outgrow_the_cache() -> None:
    """Guards batches: the first row ends after 4 rounds but is read on, 9 tokens a round, while the second takes 29."""
    prompts = [[1, 2, 3], [3, 2, 1]]
    (forever,) = texts(decoded([[]], prompts[:1], new=70, capacity=80)[0])
    plain = texts(decoded([[], []], prompts, new=29, capacity=32)[0])
    steps, _ = decoded([forever, []], prompts, new=29, capacity=32)
    assert texts(steps) == plain
    assert [len(step.tokens[0]) for step in steps[:5]] == [9, 9, 9, 2, 0]

"""Requests, samplers, drafters and batches in few words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paradraft.core import Committed, Drafter, Drafting, Request
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.stats import RoundOutput
from paradraft.models.causal_lm import CausalLM
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.verify import rule_class
from tests.conftest import tiny_tokenizer

CPU = torch.device("cpu")


def requests(
    rows: Sequence[list[int]],
    samplings: Sampling | Sequence[Sampling] = GREEDY,
    limits: int | Sequence[int] | None = None,
    *,
    eos_ids: frozenset[int] = frozenset(),
) -> list[Request]:
    """A request for each prompt, whose ids are their numbers; settings are for all of them or for each."""
    each = [samplings] * len(rows) if isinstance(samplings, Sampling) else samplings
    most = [limits] * len(rows) if isinstance(limits, int) else limits
    made = []
    for number, (tokens, sampling) in enumerate(zip(rows, each, strict=True)):
        more = {} if most is None else {"max_new_tokens": most[number]}
        made.append(Request(id=number, tokens=list(tokens), sampling=sampling, eos_ids=eos_ids, **more))
    return made


def _drafting(**settings: Any) -> Drafting:
    """With the draws that belong to its rule, if one is named."""
    draws = {"draws": rule_class(settings["rule"]).draws} if "rule" in settings else {}
    return Drafting(**draws | settings)


def sampler(
    rows: Sequence[list[int]], samplings: Sampling | Sequence[Sampling] = GREEDY, **drafting: object
) -> Sampler:
    """A sampler of a row for each prompt."""
    return Sampler(requests(rows, samplings), drafting=_drafting(**drafting))


def committed(*rows: list[int]) -> Committed:
    """The tokens that a round added to each row."""
    return Committed(tokens=list(rows))


def started(
    drafter: Drafter, rows: Sequence[list[int]], samplings: Sampling | Sequence[Sampling] = GREEDY, **drafting: object
) -> None:
    """Begins with a row for each prompt."""
    drafter.start(_drafting(**drafting), CPU)
    drafter.join(requests(rows, samplings), committed(*rows))


def round_of(accepted: list[int], drafted: list[int], *, ended: int = 0) -> RoundOutput:
    """A round of chains; the last rows, `ended` of them, had ended before."""
    rows = len(accepted)
    there = [row < rows - ended for row in range(rows)]
    return RoundOutput(
        requests=list(range(rows)),
        tokens=[[1] * (number + 1) if is_there else [] for number, is_there in zip(accepted, there, strict=True)],
        accepted=accepted,
        drafted=drafted,
        nodes=drafted,
        paths=[list(range(number)) for number in accepted],
        finished=[not is_there for is_there in there],
    )


class Varying(Fixed):
    """Another length for each row in every round; often none, and in some rounds none at all."""

    def __init__(self, k: int, seed: int = 0) -> None:
        super().__init__(k)
        self._chooser = random.Random(seed)

    def next(self) -> list[int]:
        if self._chooser.random() < 0.2:
            return [0] * self._rows
        return [self._chooser.choice([0, 0, self.k, self._chooser.randint(1, self.k)]) for _ in range(self._rows)]


def empty_rows(lm: CausalLM, number: int) -> None:
    """Begins with rows that hold nothing."""
    lm.start()
    lm.cache.join(number)


def prefilled(lm: CausalLM, rows: list[list[int]]) -> Tensor:
    """Begins with these prompts; returns the last token of each, `[B, 1]`, which is not read."""
    empty_rows(lm, len(rows))
    return torch.tensor(lm.prefill(rows).last)


def target_of(lm: CausalLM) -> Target:
    """With the tiny tokenizer."""
    return Target(lm, tiny_tokenizer())


def decoded(batch: Batch, asked: Sequence[Request]) -> list[RoundOutput]:
    """All rounds of requests that are decoded together."""
    return list(run(batch, list(map(Generation, asked))))


def texts(outputs: Sequence[RoundOutput]) -> dict[int, list[int]]:
    """The new tokens of each request."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        for request, new in zip(output.requests, output.tokens, strict=True):
            found.setdefault(request, []).extend(new)
    return found


def answers(batch: Batch, asked: Sequence[Request]) -> list[list[int]]:
    """The new tokens of requests that are decoded together."""
    generations = list(map(Generation, asked))
    for _ in run(batch, generations):
        pass
    return [generation.tokens for generation in generations]


def stepped(batch: Batch, until: Callable[[], bool]) -> list[RoundOutput]:
    """Rounds of a batch, until something is so."""
    found = []
    while not until():
        found.append(batch.step())
    return found

"""Seconds of all answers from the costs of rounds."""

from __future__ import annotations

import random

import pytest
import torch

from paradraft.core import Draft, Verdict
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.plan.costs import Costs
from paradraft.plan.predict import PLAIN, Way, best, predict, sizes
from paradraft.traits import Traits
from tests.support.decoding import CPU, requests, stepped

CHAIN = Way(k=2)


def cost(k: int, round_s: float, prefill_s: float = 0.0, draft_prefill_s: float = 0.0) -> Costs:
    time = RoundTime(draft_s=0.5 * round_s, verify_s=0.25 * round_s, other_s=0.25 * round_s)
    return Costs(rounds={k: time}, prefill_s=prefill_s, draft_prefill_s=draft_prefill_s)


class Part:
    """Stands in for all that has rows."""

    device, wants_confidence, starts, traits, k = CPU, False, 0, Traits(), 1

    def __init__(self, fewest_rows: int) -> None:
        self.fewest_rows = fewest_rows

    def keep(self, rows: torch.Tensor) -> None:
        pass

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        pass


def one_token_each(batch: Batch) -> RoundOutput:
    """A round without a pass."""
    for name in ("draft", "verify"):
        batch.clock.lap(name)
    draft = Draft.empty(len(batch.generations), CPU)
    return batch.emit(draft, Verdict(paths=[[]] * len(batch.generations), tokens=[[1]] * len(batch.generations)))


@pytest.mark.parametrize("fewest_rows", [1, 2])
def test_batches_shrink_as_the_loop_lets_them(fewest_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second rule for when rows leave: compared with `Batch` itself, token by token."""
    monkeypatch.setattr("paradraft.decode.batch.decode_round", one_token_each)
    generator = random.Random(1)
    for _ in range(20):
        lengths = [generator.randint(1, 30) for _ in range(generator.randint(2, 17))]
        part = Part(fewest_rows)
        batch = Batch(part, part, lengths=part)
        batch.sampler = part
        batch.generations = list(map(Generation, requests([[1]] * len(lengths), limits=lengths)))
        found = [len(output.requests) for output in stepped(batch, lambda batch=batch: batch.is_finished)]
        predicted = [size for size, rounds in sizes(lengths, fewest_rows=fewest_rows) for _ in range(int(rounds))]
        assert predicted == found


def test_a_batch_takes_as_long_as_its_slowest_answer() -> None:
    """Guards against means: an answer that is accepted little keeps its whole batch waiting. Prefill counts too."""
    costs = {1: {PLAIN: cost(0, 1.0), CHAIN: cost(2, 2.0, 0.5, 0.25)}, 2: {PLAIN: cost(0, 1.5), CHAIN: cost(2, 3.0)}}
    passes, answers = {PLAIN: (12, 12, 12), CHAIN: (4, 6, 12)}, {PLAIN: (12, 12, 12), CHAIN: (12, 12, 12)}
    found = {(one.batch, one.way): one for one in predict(passes, answers, costs, fewest_rows=1)}
    assert found[1, PLAIN].total_s == 36
    assert found[1, CHAIN].total_s == 3 * 0.75 + 2.0 * 22
    assert found[2, PLAIN].total_s == 1.5 * 12 + 12
    assert found[2, CHAIN].total_s == (3.0 * 4 + 2.0 * 2) + (0.75 + 2.0 * 12)
    assert found[2, CHAIN].speedup == pytest.approx(30 / 40.75)
    assert found[2, CHAIN].tokens_per_pass == 36 / 22
    assert best(list(found.values()), 1).way == PLAIN


def test_of_equals_the_one_that_drafts_least_is_chosen() -> None:
    """Guards against longer drafts for nothing."""
    ways = [Way(k=4), Way(k=8, tree=12), Way(k=8), Way(k=2)]
    costs = {1: {way: cost(way.k, 1.0) for way in [*ways, PLAIN]}}
    counts = dict.fromkeys(ways, (5,)) | {PLAIN: (10,)}
    found = predict(counts, dict.fromkeys([*ways, PLAIN], (10,)), costs, fewest_rows=1)
    assert best(found, 1).way == Way(k=2)

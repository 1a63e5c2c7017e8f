"""Seconds of all answers from the costs of rounds."""

from __future__ import annotations

import random

import pytest

from paradraft.core import Draft, Verdict
from paradraft.decode.generation import Stops
from paradraft.plan.costs import Costs, RoundTime
from paradraft.plan.predict import PLAIN, Way, best, predict, sizes

CHAIN = Way(k=2)


def cost(k: int, round_s: float, prefill_s: float = 0.0, draft_prefill_s: float = 0.0) -> Costs:
    time = RoundTime(draft_s=0.5 * round_s, verify_s=0.25 * round_s, other_s=0.25 * round_s)
    return Costs(rounds={k: time}, prefill_s=prefill_s, draft_prefill_s=draft_prefill_s)


@pytest.mark.parametrize("fewest_rows", [1, 2])
def test_batches_shrink_as_the_loop_lets_them(fewest_rows: int) -> None:
    """Guards against a second rule for when rows leave: compared with `Stops` itself, token by token."""
    generator = random.Random(1)
    for _ in range(20):
        lengths = [generator.randint(1, 30) for _ in range(generator.randint(2, 17))]
        stops, size, found = Stops(limits=lengths, eos_ids=frozenset()), len(lengths), []
        while not stops.all_finished:
            tokens = Draft.empty(size, "cpu").tokens.new_ones(size)
            draft = Draft.empty(size, "cpu")
            stops.cut(draft, Verdict.of(draft, draft.tokens, tokens))
            found.append(size)
            if (rows := stops.leave(at_least=fewest_rows)) is not None:
                size = len(rows)
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

"""Trials of `expected`: what a new engine pays to learn whether drafts pay, and what it learns by them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paradraft.decode.lengths.expected_length import Expected
from tests.support.simulated_rounds import Simulated, flat, many_passes


@pytest.mark.parametrize("checks", [True, False])
def test_slow_rounds_after_a_prompt_are_not_what_plain_decoding_takes(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards batches whose first plain rounds, after a long prefill, take twice as long: without a check of a few plain
    rounds drafts seem to pay, and many rows read their prompts with the draft model for nothing. Times are like those
    of the 1.5B with the 0.5B on two AVX2 cores."""
    if not checks:
        monkeypatch.setattr(Expected, "_is_doubtful", lambda self, plan: False)
    simulated = Simulated(
        Expected(5, one_by_one=True, reading_work=0.3),
        16,
        lambda tokens: 0.04 + 0.0145 * tokens,
        lambda rows, depth: depth * (0.02 + 0.0065 * rows),
        prompts=[60] * 16,
        reading_s=0.0042,
    )
    simulated.slowness = 1.9
    simulated.run(2, [0.7] * 16)
    simulated.slowness = 1.0
    simulated.run(125, [0.7] * 16)
    assert (max(sum(length > 0 for length in asked) for asked in simulated.asked) == 1) is checks
    assert (simulated.speed > 0.97) is checks


def first_batch(prompts: list[int], seed: int, **known: Any) -> tuple[list[int], float]:
    """The rows that draft in the first batch of an engine, and its speed. Times are like those of the 1.5B with the
    0.5B on two AVX2 cores, where drafts of four rows do not pay."""
    simulated = Simulated(
        Expected(5, **{"one_by_one": True, "reading_work": 0.3, **known}),
        4,
        lambda tokens: 0.025 + 0.0175 * tokens,
        lambda rows, depth: depth * (0.018 + 0.009 * rows),
        noise=0.05,
        prompts=prompts,
        reading_s=0.0042,
    )
    simulated.chooser = random.Random(seed)
    simulated.run(127, [0.8] * 4)
    simulated.seconds /= 1.04  # without the mean of the noise
    return [row for row in range(4) if any(asked[row] for asked in simulated.asked)], simulated.speed


def test_a_first_batch_reads_one_prompt_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first batch of an engine where drafts do not pay: the first trial is in the row with the shortest
    prompt, and no other row reads its own. All four were read, and the batch was 30 % slower than plain decoding. Where
    reading the shortest takes 3 % of the batch, no draft is tried."""
    short, long = [153, 94, 40, 121], [400, 380, 300, 390]
    for seed in range(6):
        drafted, speed = first_batch(short, seed)
        assert drafted == [2] and speed > 0.975
        drafted, speed = first_batch(long, seed)
        assert drafted == [] and speed > 0.99
    assert min(first_batch(short, seed, one_by_one=False)[1] for seed in range(6)) < 0.97, "deep drafts look free"
    assert first_batch(long, 0, reading_work=0.0)[0] == [2], "reading looks free"
    monkeypatch.setattr(Expected, "_is_affordable", lambda self, trial, plan: True)
    drafted, speed = first_batch(long, 0)
    assert drafted == [2] and speed < 0.96


def test_prompts_that_need_no_reading_have_no_price() -> None:
    """Guards prompts of one token, and those whose prefix is known: a division by zero ended the answer."""
    simulated = Simulated(Expected(5, one_by_one=True, reading_work=0.3), 2, flat, many_passes, prompts=[1, 1])
    simulated.policy.learn_prefill(0, 0.1)
    simulated.run(40, [0.9] * 2)
    assert any(map(any, simulated.asked))


@pytest.mark.parametrize("rows", [1, 4])
def test_one_slow_prefill_does_not_end_drafting(rows: int) -> None:
    """Guards a first prefill that waits for a compiler or a disk: reading and drafting look as dear as it, until others
    show what they take. In the second of two batches, rows draft most of the time."""
    policy = Expected(5, one_by_one=True, reading_work=0.3)
    for number in range(2):
        simulated = Simulated(
            policy, rows, lambda tokens: 0.02 + 0.0005 * tokens, lambda rows, depth: 0.002 * depth, prompts=[60] * rows
        )
        if not number:
            policy.learn_prefill(60 * rows, 10.0)
        simulated.run(127, [0.85] * rows)
    assert sum(map(any, simulated.asked)) > 0.8 * len(simulated.asked)


def test_trials_come_back_though_texts_grow() -> None:
    """Guards a text that the drafter has not read, which grows faster than the time that trials may lose: after rounds
    in which nothing is accepted, it drafts again once everything is."""
    for seed in range(4):
        simulated = Simulated(
            Expected(5, one_by_one=True, reading_work=0.3),
            1,
            lambda tokens: 0.06 + 0.005 * tokens,
            lambda rows, depth: depth * (0.012 + 0.001 * rows),
            prompts=[100],
            reading_s=0.0042,
            most=10_000,
        )
        simulated.chooser = random.Random(seed)
        simulated.run(200, [0.0])
        simulated.run(1000, [0.97])
        assert sum(map(any, simulated.asked[-300:])) > 0.8 * 300

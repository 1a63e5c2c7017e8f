"""The simulator of drafting ahead: its rates are those of rounds that are drawn, and its bounds those of arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paradraft.bench.synthetic import DrawnAheadBatch, chances_of
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.models.causal_lm import CausalLM
from paradraft.plan.simulate import (
    Mirror,
    RoundTimes,
    accepted,
    plain_speed,
    simulate,
    speed_ahead,
    speed_in_turn,
    speed_mirrored,
)
from paradraft.sampling_params import Sampling
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import decoded, requests, target_of

CHANCES = [0.9, 0.7, 0.8, 0.6]
TIMES = RoundTimes(target_s=1.0, draft_s=0.3, verify_s=1.1, transport_s=0.01, rest_s=0.05, contention=1.2)


def drawn_speed(times: RoundTimes, chances: Sequence[float], gamma: int, overlap: str, rounds: int = 200_000) -> float:
    """Algorithm 2 round by round, with random verdicts."""
    choose = random.Random(1)
    both, besides = times.contention, times.transport_s + times.rest_s
    window_s = gamma * times.draft_s
    tokens = seconds = 0.0
    first = 0  # the place in its window of the draft's first token; 0: there is no draft
    for _ in range(rounds):
        if overlap == "post" and not first:
            seconds, first = seconds + window_s + besides, 1
        places = range(first - 1, gamma) if first else range(0)
        right = 0
        while right < len(places) and choose.random() < chances[places[right]]:
            right += 1
        tokens += right + 1
        pass_s = times.pass_s if first else times.target_s
        drafts = not (overlap == "pre" and first)
        seconds += (both * max(pass_s, window_s) if drafts else pass_s) + besides
        goes_on = drafts and right == len(places) and choose.random() < chances[0]
        first = 2 if goes_on else 0
    return tokens / seconds


@pytest.mark.parametrize("overlap", ["both", "pre", "post"])
@pytest.mark.parametrize("gamma", [2, 4])
def test_rates_are_those_of_rounds_that_are_drawn(gamma: int, overlap: str) -> None:
    """Guards the chain of states against a loop that has none; the mean of 200,000 rounds is within 0.5 %."""
    assert speed_ahead(TIMES, CHANCES, gamma, overlap=overlap) == pytest.approx(
        drawn_speed(TIMES, CHANCES, gamma, overlap), rel=0.005
    )


@pytest.mark.parametrize("overlap", ["both", "pre", "post"])
def test_drawn_verdicts_of_the_loop_have_these_rates(overlap: str) -> None:
    """Guards synthetic acceptance of drafting ahead: tokens a round of the loop itself, with drawn verdicts. The
    bound of 5 % is five standard errors and more of some 4,000 rounds."""
    target, lm = target_of(CausalLM(tiny_model(1).float(), vocab_size=VOCAB)), tiny_model(2).float()
    drafter = AutoregressiveDrafter(CausalLM(lm, vocab_size=VOCAB))
    tokens = rounds = 0
    for seed in range(4):
        batch = DrawnAheadBatch(target, drafter, chances=tuple(CHANCES), lengths=Fixed(4), overlap=overlap)
        asked = requests([[1, 2]] * 16, [Sampling(seed=100 * seed + row) for row in range(16)], 100)
        for step in decoded(batch, asked):
            tokens += sum(map(len, step.tokens))
            rounds += sum(bool(new) for new in step.tokens)
    unit = RoundTimes(target_s=1.0, draft_s=1e-9)
    assert tokens / rounds == pytest.approx(speed_ahead(unit, CHANCES, 4, overlap=overlap), rel=0.05)


def test_what_arithmetic_says() -> None:
    assert chances_of([0.9, 0.45, 0.45]) == pytest.approx([0.9, 0.5, 1.0])
    assert accepted([0.9, 0.5, 1.0]) == pytest.approx(0.9 + 0.45 + 0.45)
    assert plain_speed(RoundTimes(target_s=0.02, draft_s=0.01)) == 50
    perfect, times = [1.0] * 8, RoundTimes(target_s=1.0, draft_s=0.25)
    assert speed_in_turn(times, perfect, 4) == pytest.approx(5 / 2)
    assert speed_ahead(times, perfect, 4) == pytest.approx(4)
    assert speed_ahead(times, perfect, 8) == pytest.approx(4)  # the draft model's own speed is the bound
    assert speed_ahead(times, perfect, 8, is_parallel=True) == pytest.approx(8)
    assert speed_ahead(times, [0.0] * 8, 4) == pytest.approx(1)


def test_mirrored_rounds_are_those_that_are_drawn() -> None:
    """Guards the mean of a round against rounds that are drawn one by one, where a draft is ready or is drafted."""
    choose, mirror, k = random.Random(1), Mirror(exit_share=0.4, named_share=0.7, branch_cost=1.5), 4
    window_s, tokens, seconds = k * TIMES.draft_s, 0, 0.0
    suffix_s = 0.6 * TIMES.pass_s  # shorter than the drafts, and slowed down as they are while it runs
    for _ in range(200_000):
        right = 0
        while right < k and choose.random() < CHANCES[right]:
            right += 1
        tokens += right + 1
        seconds += 0.4 * TIMES.pass_s + 1.5 * window_s + 0.2 * suffix_s + TIMES.transport_s + TIMES.rest_s
        if choose.random() >= 0.7:  # the exit did not name the next token
            seconds += window_s + TIMES.transport_s
    assert speed_mirrored(TIMES, CHANCES, k, mirror) == pytest.approx(tokens / seconds, rel=0.005)


def test_bounds_of_mirrored_rounds() -> None:
    """An exit at the end, or one that names nothing, is a draft in turn; a draft in the shade of the pass is free."""
    times, perfect = RoundTimes(target_s=1.0, draft_s=0.1), [1.0] * 8
    in_turn = speed_in_turn(times, perfect, 4)
    assert speed_mirrored(times, perfect, 4, Mirror(exit_share=1.0, named_share=1.0)) == pytest.approx(in_turn)
    assert speed_mirrored(times, perfect, 4, Mirror(exit_share=0.5, named_share=0.0)) == pytest.approx(in_turn)
    assert speed_mirrored(times, perfect, 5, Mirror(exit_share=0.5, named_share=1.0)) == pytest.approx(6)
    alone = RoundTimes(target_s=1.0, draft_s=0.1, contention=2.0)
    assert speed_mirrored(alone, perfect, 4, Mirror(exit_share=1.0, named_share=1.0)) == pytest.approx(in_turn)
    found = {one.method: one for one in simulate(times, [0.9**place for place in range(1, 12)],
                                                 mirror=Mirror(exit_share=0.5, named_share=0.9))}  # fmt: skip
    assert list(found) == ["AR+", "VSD", "PEARL", "Mirror-SD"]
    assert found["Mirror-SD"].speedup > found["VSD"].speedup


@pytest.mark.parametrize(
    "wrong", [{"exit_share": -0.1}, {"named_share": 1.5}, {"exit_share": float("nan")}, {"branch_cost": 0.5}]
)
def test_shares_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Mirror(**{"exit_share": 0.5, "named_share": 0.5, **wrong})


def test_the_best_number_of_tokens_is_chosen() -> None:
    """As the paper says, γ is the ratio of speeds where drafts are good (section 4.4.1)."""
    rates = [0.95 ** (place + 1) for place in range(12)]
    found = {one.method: one for one in simulate(RoundTimes(target_s=1.0, draft_s=0.2, window_s=0.3), rates, rates)}
    assert list(found) == ["AR+", "VSD", "PEARL", "PARD", "PEARL + PARD"]
    assert found["PEARL"].tokens == 5 and found["PEARL"].speedup > found["VSD"].speedup > 1
    assert found["PEARL + PARD"].speedup > found["PEARL"].speedup


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"target_s": 0.0}, "target_s=0.0"), ({"window_s": -1.0}, "window_s"), ({"transport_s": -1.0}, "transport_s"),
     ({"contention": 0.5}, "contention=0.5")],
)  # fmt: skip
def test_times_that_are_none(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RoundTimes(**{"target_s": 1.0, "draft_s": 1.0, **wrong})

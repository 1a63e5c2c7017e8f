"""Sizes of the pieces in which prompts are read, from the times of rounds."""

from __future__ import annotations

import random

import pytest

from paradraft.decode.prefill import PrefillPace

START_S, ROW_S, TOKEN_S = 0.004, 0.0006, 0.0003


def seconds(rows: int, tokens: int) -> float:
    return START_S + ROW_S * rows + TOKEN_S * tokens


def right(rows: int) -> float:
    return PrefillPace.ROUNDS_OF_A_PIECE * seconds(rows, 0) / TOKEN_S


def test_a_busy_server_learns_from_rounds_that_read() -> None:
    """Guards many clients from the first one on: no round ever reads nothing. Taken for as long as one row's, rounds
    read small pieces, so few rows ran, so pieces stayed small, at two thirds of the speed."""
    pace, chooser = PrefillPace(), random.Random(0)
    pace.add(0, 60, seconds=seconds(0, 60))
    pace.add(1, 0, seconds=seconds(1, 0))
    for number in range(60):
        rows = min(1 + number, 28 + chooser.randrange(5))
        tokens = max(pace.most(rows) - chooser.randrange(10), 4)
        pace.add(rows, tokens, seconds=seconds(rows, tokens) * chooser.uniform(0.95, 1.05))
    assert pace.most(32) == pytest.approx(right(32), rel=0.2)


def test_disturbed_rounds_count_little() -> None:
    pace, chooser = PrefillPace(), random.Random(1)
    for _ in range(90):
        rows, tokens = chooser.randint(1, 16), chooser.choice((0, 0, chooser.randint(4, 90)))
        factor = 10.0 if chooser.random() < 0.1 else chooser.uniform(0.97, 1.03)
        pace.add(rows, tokens, seconds=factor * seconds(rows, tokens))
    for rows in (1, 4, 16):
        assert pace.most(rows) == pytest.approx(right(rows), rel=0.2)


def test_rounds_that_are_all_alike_leave_pieces_as_they_are() -> None:
    """Guards a fit with one equation: pieces neither grow without end nor shrink to nothing."""
    pace = PrefillPace()
    for _ in range(200):
        tokens = min(pace.most(8), 300)
        pace.add(8, tokens, seconds=seconds(8, tokens))
    assert 0.5 * right(8) < pace.most(8) < 4 * right(8)


def test_a_fast_round_does_not_decide_alone() -> None:
    """Guards relative deviations: those from a time near zero would be larger than all others."""
    pace, chooser = PrefillPace(), random.Random(3)
    for _ in range(60):
        rows, tokens = chooser.randint(1, 16), chooser.choice((0, chooser.randint(4, 90)))
        pace.add(rows, tokens, seconds=seconds(rows, tokens))
    for factor in (0.1, 0.0):
        pace.add(8, 40, seconds=factor * seconds(8, 40))
        pace.add(8, 0, seconds=factor * seconds(8, 0))
    assert pace.most(8) == pytest.approx(right(8), rel=0.4)


def test_the_first_fit_of_rounds_that_are_all_alike() -> None:
    """Guards one equation for three times."""
    pace = PrefillPace()
    for _ in range(96):
        pace.add(8, 60, seconds=seconds(8, 60))
    assert 30 <= pace.most(8) <= 120


def test_pieces_are_doubled_at_most() -> None:
    """Guards against a huge piece after small ones that took no time that could be measured."""
    pace, largest = PrefillPace(), 64
    for _ in range(12):
        tokens = pace.most(2)
        assert tokens <= 2 * largest
        largest = max(largest, tokens)
        pace.add(2, tokens, seconds=START_S)
    assert largest > 1000


def test_a_machine_that_becomes_slower_reads_the_same() -> None:
    """Guards the scale: what counts is how long a token takes beside a round."""
    pace, chooser = PrefillPace(), random.Random(2)
    for number in range(120):
        rows, tokens = chooser.randint(1, 8), chooser.choice((0, chooser.randint(4, 60)))
        pace.add(rows, tokens, seconds=seconds(rows, tokens) * (1.0 if number < 40 else 3.0))
    assert pace.most(4) == pytest.approx(right(4), rel=0.2)
    assert pace.alone == pytest.approx((PrefillPace.ALONE_S - 3 * START_S) / (3 * TOKEN_S), rel=0.2)


@pytest.mark.parametrize("rounds", [[], [(1, 0)], [(0, 50)], [(0, 50), (1, 0)], [(1, 5)], [(0, 1), (0, 1)]])
@pytest.mark.parametrize("time_s", [0.0, 1e-6, 5.0])
def test_little_is_known(rounds: list[tuple[int, int]], time_s: float) -> None:
    pace = PrefillPace()
    for rows, tokens in rounds:
        pace.add(rows, tokens, seconds=time_s)
    assert pace.LEAST <= pace.most(1) <= 128 and pace.LEAST_ALONE <= pace.alone <= 128

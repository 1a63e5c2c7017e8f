from __future__ import annotations

from paradraft.train.run.progress import BestSoFar, Score


def worth(step: int, length: float | None, loss: float) -> Score:
    return Score(step=step, acceptance_length=length, held_out_loss=loss)


def test_the_best_is_the_longest_and_of_equals_the_surest() -> None:
    """Guards which drafter is shipped: length before loss, loss where lengths are equal or nobody measures them, and of
    drafters that are worth the same the first."""
    best = []
    standing = BestSoFar()
    for found in (worth(1, 2.0, 1.0), worth(2, 1.9, 0.1), worth(3, 2.0, 0.9), worth(4, 2.0, 0.9), worth(5, 2.1, 3.0)):
        standing = standing.after(found)
        best.append((standing.best.step, standing.stale))
    assert best == [(1, 0), (1, 1), (3, 0), (3, 1), (5, 0)]
    assert worth(1, 2.0, 1.0) < worth(2, 1.99, 0.9), "lengths that differ by chance"
    assert worth(2, 1.97, 0.9) < worth(1, 2.0, 1.0)
    alone = BestSoFar().after(worth(1, None, 1.0)).after(worth(2, None, 0.5))
    assert alone.best == worth(2, None, 0.5)


def test_the_best_is_never_far_from_the_longest() -> None:
    """Guards a run whose lengths fall a little at each evaluation, each time by less than chance explains."""
    standing = BestSoFar()
    for step in range(1, 9):
        standing = standing.after(worth(step, 2.5 * 0.993**step, 1.0 - 0.01 * step))
    assert standing.best is not None and standing.best.step == 2 and standing.stale == 6


def test_patience() -> None:
    """Guards against a run that stops an evaluation early or late, or without having been told to."""
    standing = BestSoFar().after(worth(1, None, 1.0))
    overs = []
    for step in (2, 3, 4):
        standing = standing.after(worth(step, None, 2.0))
        overs.append((standing.is_over(2), standing.is_over(None)))
    assert overs == [(False, False), (True, False), (True, False)]

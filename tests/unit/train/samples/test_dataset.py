from __future__ import annotations

from paradraft.data.samples import Sample
from paradraft.train.samples.dataset import BatchSampler


def test_every_epoch_goes_through_all_samples_in_its_own_order() -> None:
    """Guards against samples never seen, and steps that straddle two epochs; step n never depends on step n - 1."""
    samples = [Sample(tokens=[i] * (2 + i % 3), is_label=[True] * (2 + i % 3)) for i in range(7)]
    order = BatchSampler(samples, per_step=3, seed=0)
    seen = [sample.tokens[0] for step in range(7) for sample in order.samples_of(step)]
    assert [sample.tokens[0] for sample in BatchSampler(samples, per_step=3, seed=0).samples_of(4)] == seen[12:15]
    epochs = [seen[start : start + 7] for start in range(0, 21, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_samples_of_like_length_come_together() -> None:
    """Guards against steps that are half filling: one long sample in every step of short ones."""
    lengths = [10, 500] * 64
    samples = [Sample(tokens=[1] * length, is_label=[True] * length) for length in lengths]
    order = BatchSampler(samples, per_step=4, seed=0)
    steps = [[len(sample.tokens) for sample in order.samples_of(step)] for step in range(32)]
    assert all(len(set(step)) == 1 for step in steps)
    assert steps != sorted(steps), "long and short steps still come in random order"

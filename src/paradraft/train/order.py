"""Which samples a step sees: a function of (seed, step), so that a resumed run goes on exactly."""

from __future__ import annotations

import torch

from paradraft.train.sample import Sample

WINDOW = 32
"""Steps over which samples of like length are brought together."""


class Order:
    """Goes through all samples once in every epoch, each time in another random order.

    Samples of like length come in one step, so that little is filled up: each epoch is shuffled,
    sorted by length within windows of some steps, and the steps of a window are shuffled again.

    Args:
        samples: what to order.
        per_step: samples of a step.
        seed: of the shuffling.
    """

    def __init__(self, samples: list[Sample], *, per_step: int, seed: int) -> None:
        self._lengths = torch.tensor([len(sample.tokens) for sample in samples])
        self._samples = samples
        self._per_step = per_step
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def samples_of(self, step: int) -> list[Sample]:
        """The samples of a step; the last step of an epoch ends with the first samples of the next."""
        chosen = []
        for index in range(step * self._per_step, (step + 1) * self._per_step):
            epoch, place = divmod(index, len(self._samples))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._order_of(epoch)
            chosen.append(self._samples[self._order[place]])
        return chosen

    def _order_of(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 7919 + epoch)
        order: list[int] = []
        for window in torch.randperm(len(self._lengths), generator=generator).split(WINDOW * self._per_step):
            steps = window[self._lengths[window].argsort(stable=True)].split(self._per_step)
            # The rest of a window stays at its end, or all later steps would be cut across two lengths.
            whole = len(steps) if len(steps[-1]) == self._per_step else len(steps) - 1
            for step in [*torch.randperm(whole, generator=generator).tolist(), *range(whole, len(steps))]:
                order += steps[step].tolist()
        return order

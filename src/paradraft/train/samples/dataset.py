"""The samples of the data set, shuffled anew in each epoch.

The samples of a step depend on (seed, step) only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paradraft.data.mix import epoch_size, taken_in, weights_of
from paradraft.data.samples import Sample
from paradraft.train.samples import SampleSource, SourceData

WINDOW = 32
"""Steps within which samples are sorted by length."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The source has no settings."""


class BatchSampler(SampleSource):
    """Orders the samples of each epoch at random; a sample occurs as often as its weight says.

    To save padding, samples of similar length share a step: each epoch is shuffled, sorted by length within windows of
    `WINDOW` steps, and the steps of a window are shuffled again.
    """

    def __init__(self, samples: list[Sample], *, per_step: int, seed: int) -> None:
        self._lengths = torch.tensor([len(sample.tokens) for sample in samples])
        self._weights = weights_of(samples)
        self._per_epoch = epoch_size(samples)
        self._samples = samples
        self._per_step = per_step
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def samples_of(self, step: int) -> list[Sample]:
        """See `SampleSource`; the last step of an epoch is completed with the first samples of the next."""
        chosen = []
        for index in range(step * self._per_step, (step + 1) * self._per_step):
            epoch, i = divmod(index, self._per_epoch)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._order_of(epoch)
            chosen.append(self._samples[self._order[i]])
        return chosen

    def _order_of(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 7919 + epoch)
        order: list[int] = []
        taken = taken_in(self._weights, epoch, self._seed)
        for indices in torch.randperm(len(taken), generator=generator).split(WINDOW * self._per_step):
            window = taken[indices]
            steps = window[self._lengths[window].argsort(stable=True)].split(self._per_step)
            # An incomplete step stays at the end of its window, or all later steps would mix two lengths.
            whole = len(steps) if len(steps[-1]) == self._per_step else len(steps) - 1
            for step in [*torch.randperm(whole, generator=generator).tolist(), *range(whole, len(steps))]:
                order += steps[step].tolist()
        return order


def build(config: Config, data: SourceData) -> BatchSampler:
    """The samples in their order."""
    return BatchSampler(data.samples, per_step=data.per_step, seed=data.seed)

"""The batch of a training step: which samples it has, and the rows that they become.

Which samples a step sees is a function of (seed, step), so that a resumed run continues exactly. COD drops rows,
packing joins samples, filling makes lengths equal. Memory is that of the kept rows, about 3.4 for each token at the
defaults, never K: which row sees which is computed on the device, from three numbers each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradraft.data.mix import epoch_size, taken_in, weights_of
from paradraft.data.samples import Sample
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.rows import FILLING, Rows, conditional_drop

WINDOW = 32
"""Steps over which samples of like length are brought together."""


class BatchSampler:
    """Goes through all samples once in every epoch, or as often as they weigh, each time in another random order.

    Samples of like length come in one step, so that little is filled up: each epoch is shuffled,
    sorted by length within windows of some steps, and the steps of a window are shuffled again.

    Args:
        samples: what to order.
        per_step: samples of a step.
        seed: of the shuffling.
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
        """The samples of a step; the last step of an epoch ends with the first samples of the next."""
        chosen = []
        for index in range(step * self._per_step, (step + 1) * self._per_step):
            epoch, place = divmod(index, self._per_epoch)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._order_of(epoch)
            chosen.append(self._samples[self._order[place]])
        return chosen

    def _order_of(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 7919 + epoch)
        order: list[int] = []
        taken = taken_in(self._weights, epoch, self._seed)
        for places in torch.randperm(len(taken), generator=generator).split(WINDOW * self._per_step):
            window = taken[places]
            steps = window[self._lengths[window].argsort(stable=True)].split(self._per_step)
            # The rest of a window stays at its end, or all later steps would be cut across two lengths.
            whole = len(steps) if len(steps[-1]) == self._per_step else len(steps) - 1
            for step in [*torch.randperm(whole, generator=generator).tolist(), *range(whole, len(steps))]:
                order += steps[step].tolist()
        return order


@dataclass(frozen=True, kw_only=True)
class Drop:
    """COD's settings, as in `conditional_drop`, and the mask token.

    Args:
        k: depths.
        r: share of rows kept from depth to depth.
        r_min: least share.
        mask_id: the mask token; None where k is 1 and no row holds one.
        masks: how many ids from `mask_id` on serve the depths from 1 on; the last serves all deeper ones.
        reads_first: whether there are rows of the first token of a sample, and of masks after it.
    """

    k: int
    r: float
    r_min: float
    mask_id: int | None
    masks: int = 1
    reads_first: bool = True

    def tokens(self, real: Tensor, depth: Tensor) -> Tensor:
        """What rows read: the real token at depth 0, masks after it.

        >>> real, depth = torch.tensor([7, 8, 7, 8]), torch.tensor([0, 1, 2, 3])
        >>> Drop(k=4, r=1.0, r_min=1.0, mask_id=90).tokens(real, depth).tolist()
        [7, 90, 90, 90]
        >>> Drop(k=4, r=1.0, r_min=1.0, mask_id=90, masks=2).tokens(real, depth).tolist()
        [7, 90, 91, 91]
        """
        if self.mask_id is None:
            assert not depth.any()
            return real
        return torch.where(depth == 0, real, self.mask_id + (depth - 1).clamp(max=self.masks - 1))


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The samples of a batch as they were, for a teacher to read: each without its last token.

    Args:
        tokens: `[S, N]` token ids, filled up on the right with 0; N is the longest's length.
        positions: `[S, N]` place of each token in its sample.
        documents: `[S, N]` which of the packed samples, or `FILLING`.
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Rows of several samples, filled up to the same number.

    Args:
        tokens: `[S, R]` input ids: the real token, or the mask.
        positions: `[S, R]` position ids.
        depths: `[S, R]` depths.
        documents: `[S, R]` which of the packed samples, or `FILLING`.
        labels: `[S, R]` the next token, or `IGNORED`.
        places: `[S, R]` which token of `texts` each row predicts after.
        texts: the samples themselves.
    """

    tokens: Tensor
    positions: Tensor
    depths: Tensor
    documents: Tensor
    labels: Tensor
    places: Tensor
    texts: Texts

    @property
    def rows(self) -> Rows:
        """Who is where, for the attention rule."""
        return Rows(position=self.positions, depth=self.depths, document=self.documents)

    def labels_by_depth(self, k: int) -> Tensor:
        """`[k]` how many rows of each depth have a label."""
        return torch.bincount(self.depths[self.labels != IGNORED], minlength=k)

    def before(self) -> Tensor:
        """`[S * R]` for each row the index, among all rows, of the one before it in its chain: one depth and one place
        less. For real tokens and filling rows anything."""
        (S, R), N, K = self.depths.shape, self.texts.tokens.shape[1], int(self.depths.max()) + 1
        samples = torch.arange(S, device=self.depths.device)[:, None]
        keys = ((samples * N + self.places) * K + self.depths).flatten()  # of each row; unique, but for filling rows
        row_of = torch.zeros(S * N * K, dtype=torch.long, device=keys.device)
        is_row = self.documents.flatten() != FILLING
        row_of[keys[is_row]] = torch.arange(S * R, device=keys.device)[is_row]
        return row_of[(keys - K - 1).clamp(min=0)]

    def to(self, device: torch.device) -> TrainingBatch:
        """The same on another device."""
        texts = Texts(**{name: tensor.to(device) for name, tensor in vars(self.texts).items()})
        mine = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return TrainingBatch(**mine, texts=texts)


def collate(groups: list[list[Sample]], drop: Drop, generators: list[list[torch.Generator]]) -> TrainingBatch:
    """Drops rows by COD and puts the rest side by side.

    Args:
        groups: S lists of samples; the samples of a list are packed one after the other.
        drop: what to drop.
        generators: for each sample the source of its random choice, so that it does not depend on the
            samples beside it.
    """
    joined = [_pack(samples, drop, sources) for samples, sources in zip(groups, generators, strict=True)]
    fill = {"documents": FILLING, "labels": IGNORED}
    rows = {name: _side_by_side([each[0][name] for each in joined], fill.get(name, 0)) for name in joined[0][0]}
    texts = {name: _side_by_side([each[1][name] for each in joined], fill.get(name, 0)) for name in joined[0][1]}
    return TrainingBatch(**rows, texts=Texts(**texts))


def _pack(
    samples: list[Sample], drop: Drop, generators: list[torch.Generator]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rows and the texts of samples one after the other, by the names of `TrainingBatch` and `Texts`."""
    rows: list[dict[str, Tensor]] = []
    texts: list[dict[str, Tensor]] = []
    before = 0
    for document, (sample, generator) in enumerate(zip(samples, generators, strict=True)):
        # Copied: torch warns of memory that it may not write to, such as that of a file that is mapped.
        real = torch.from_numpy(np.array(sample.tokens, dtype=np.int64))
        is_label = torch.from_numpy(np.array(sample.is_label, dtype=np.bool_))
        n = len(real) - 1
        kept = conditional_drop(n, k=drop.k, r=drop.r, r_min=drop.r_min, generator=generator, may_draft=is_label[1:])
        at, depth = kept.position, kept.depth
        if not drop.reads_first and bool((is_later := kept.anchor > 0).any()):
            at, depth = at[is_later], depth[is_later]
        rows.append(
            {
                "tokens": drop.tokens(real[at], depth),
                "positions": at,
                "depths": depth,
                "documents": torch.full_like(at, document),
                "labels": torch.where(is_label[at + 1], real[at + 1], IGNORED),
                "places": before + at,
            }
        )
        everywhere = torch.arange(n)
        document_n = torch.full_like(everywhere, document)
        texts.append({"tokens": real[:-1], "positions": everywhere, "documents": document_n})
        before += n
    return _joined(rows), _joined(texts)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _side_by_side(rows: list[Tensor], filling: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filling)


def pack(samples: list[Sample], room: int) -> list[list[int]]:
    """Which samples go one after the other so that few groups of at most `room` tokens are filled: the longest first,
    each into the first group it fits in.

    >>> pack([Sample(tokens=[0] * n, is_label=[True] * n) for n in (4, 9, 3, 6)], room=10)
    [[1], [3, 0], [2]]
    """
    groups: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens)):
        size = len(samples[index].tokens)
        place = next((g for g, taken in enumerate(used) if taken + size <= room), len(groups))
        if place == len(groups):
            groups.append([])
            used.append(0)
        groups[place].append(index)
        used[place] += size
    return groups

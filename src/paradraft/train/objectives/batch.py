"""Training batches: COD, packing and padding.

COD drops rows, packing joins samples, padding makes lengths equal. Memory grows with the kept rows, about 3.4 per token
at the defaults instead of K: the attention mask is computed on the device, from position, depth and document of each
row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paradraft.data.samples import Sample
from paradraft.formats.vocab_map import VocabMap
from paradraft.train.objectives.losses import IGNORED
from paradraft.train.objectives.rows import FILLING, Rows, conditional_drop


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Settings of COD, as in `conditional_drop`, and the mask token.

    Args:
        r: share of rows kept from depth to depth.
        r_min: least share.
        mask_id: the mask token; None if k is 1.
        masks: count of mask ids from `mask_id` on, one for each depth from 1 on; the last serves all deeper ones.
        reads_first: whether the first token of a sample, and masks after it, become rows.
        first: depth of the first drafted token.
    """

    k: int
    r: float
    r_min: float
    mask_id: int | None
    masks: int = 1
    reads_first: bool = True
    first: int = 0

    def tokens(self, real: Tensor, depth: Tensor) -> Tensor:
        """Input ids of rows: the real token at depth 0, masks below.

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
    """The samples of a batch, each without its last token, for a teacher to read.

    Args:
        tokens: `[S, N]` token ids, padded on the right with 0.
        positions: `[S, N]` position of each token in its sample.
        documents: `[S, N]` index of the packed sample, or `FILLING`.
    """

    tokens: Tensor
    positions: Tensor
    documents: Tensor

    def places(self) -> Iterator[tuple[int, slice]]:
        """Group and place of each sample."""
        for group, documents_N in enumerate(self.documents):
            kinds, counts = documents_N.unique_consecutive(return_counts=True)
            first = 0
            for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
                if kind != FILLING:
                    yield group, slice(first, first + count)
                first += count


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Rows of several samples, padded to the same length.

    Args:
        tokens: `[S, R]` input ids: the real token, or the mask.
        positions: `[S, R]` position ids.
        depths: `[S, R]`.
        documents: `[S, R]` index of the packed sample, or `FILLING`.
        labels: `[S, R]` the next token, or `IGNORED`.
        text_indices: `[S, R]` index in `texts` of the token after which each row predicts.
        is_bare: `[S, R]` rows that are trained without the target's states; None for none.
        first: depth of the first drafted token.
    """

    tokens: Tensor
    positions: Tensor
    depths: Tensor
    documents: Tensor
    labels: Tensor
    text_indices: Tensor
    texts: Texts
    is_bare: Tensor | None = None
    first: int = 0

    @property
    def rows(self) -> Rows:
        """Coordinates of the rows, for the attention mask."""
        return Rows(position=self.positions, depth=self.depths, document=self.documents)

    @property
    def tokens_before(self) -> Tensor:
        """`[S, R]` the text's tokens after which the rows predict."""
        return self.texts.tokens.gather(1, self.text_indices)

    def labels_by_depth(self, k: int) -> Tensor:
        """`[k]` rows with a label, by depth."""
        return torch.bincount(self.depths[self.labels != IGNORED], minlength=k)

    def labelled_by_rows(self, vocab_map: VocabMap) -> TrainingBatch:
        """The batch with the head's rows as labels, and none where the next token has no row."""
        rows_SR = vocab_map.rows_of(self.labels)
        return replace(self, labels=rows_SR.masked_fill(rows_SR < 0, IGNORED))

    def before(self) -> Tensor:
        """`[S * R]` index, among all rows, of the previous row in each row's chain: position and depth smaller by one.
        Undefined for real tokens and padding."""
        (S, R), N, K = self.depths.shape, self.texts.tokens.shape[1], int(self.depths.max()) + 1
        samples = torch.arange(S, device=self.depths.device)[:, None]
        # Unique except for padding.
        keys = ((samples * N + self.text_indices) * K + self.depths).flatten()
        row_of = torch.zeros(S * N * K, dtype=torch.long, device=keys.device)
        is_row = self.documents.flatten() != FILLING
        row_of[keys[is_row]] = torch.arange(S * R, device=keys.device)[is_row]
        return row_of[(keys - K - 1).clamp(min=0)]

    def to(self, device: torch.device) -> TrainingBatch:
        """Copies the batch to a device."""
        texts = Texts(**{name: tensor.to(device) for name, tensor in vars(self.texts).items()})
        mine = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return TrainingBatch(**mine, texts=texts, first=self.first)


def collate(groups: list[list[Sample]], drop: Drop, generators: list[list[torch.Generator]]) -> TrainingBatch:
    """Drops rows by COD, packs the samples of each group and pads the groups; see `Trainee.collate`."""
    joined = [_pack(samples, drop, sources) for samples, sources in zip(groups, generators, strict=True)]
    fill = {"documents": FILLING, "labels": IGNORED}
    rows = {name: _padded([each[0][name] for each in joined], fill.get(name, 0)) for name in joined[0][0]}
    texts = {name: _padded([each[1][name] for each in joined], fill.get(name, 0)) for name in joined[0][1]}
    return TrainingBatch(**rows, texts=Texts(**texts), first=drop.first)


def _pack(
    samples: list[Sample], drop: Drop, generators: list[torch.Generator]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns rows and texts of packed samples, by the fields of `TrainingBatch` and `Texts`."""
    rows: list[dict[str, Tensor]] = []
    texts: list[dict[str, Tensor]] = []
    offset = 0
    for document, (sample, generator) in enumerate(zip(samples, generators, strict=True)):
        # Copied: torch warns of read-only memory, such as that of a memory-mapped file.
        real = torch.from_numpy(np.array(sample.tokens, dtype=np.int64))
        is_label = torch.from_numpy(np.array(sample.is_label, dtype=np.bool_))
        n = len(real) - 1
        may_draft = torch.from_numpy(sample.may_draft(drop.first))
        r = 1.0 if sample.least_round else drop.r  # few anchors would have no deep rows
        kept = conditional_drop(n, k=drop.k, r=r, r_min=drop.r_min, generator=generator, may_draft=may_draft)
        position, depth = kept.position, kept.depth
        if not drop.reads_first and bool((is_later := kept.anchor > 0).any()):
            position, depth = position[is_later], depth[is_later]
        rows.append(
            {
                "tokens": drop.tokens(real[position], depth),
                "positions": position,
                "depths": depth,
                "documents": torch.full_like(position, document),
                "labels": torch.where(
                    is_label[position + 1] & may_draft[position - depth], real[position + 1], IGNORED
                ),
                "text_indices": offset + position,
            }
        )
        positions = torch.arange(n)
        document_n = torch.full_like(positions, document)
        texts.append({"tokens": real[:-1], "positions": positions, "documents": document_n})
        offset += n
    return _joined(rows), _joined(texts)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _padded(rows: list[Tensor], filling: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filling)


def pack(samples: list[Sample], room: int) -> list[list[int]]:
    """Packs samples into few groups of at most `room` tokens, by first-fit decreasing; returns their indices.

    >>> pack([Sample(tokens=[0] * n, is_label=[True] * n) for n in (4, 9, 3, 6)], room=10)
    [[1], [3, 0], [2]]
    """
    groups: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i].tokens)):
        size = len(samples[index].tokens)
        target = next((g for g, taken in enumerate(used) if taken + size <= room), len(groups))
        if target == len(groups):
            groups.append([])
            used.append(0)
        groups[target].append(index)
        used[target] += size
    return groups


def by_depth(parts: list[Tensor], batch: TrainingBatch, like_SRD: Tensor) -> Tensor:
    """Merges tensors `[m, D]`, one for the rows of each depth in their order, into `[S, R, D]`."""
    merged_SRD = torch.zeros_like(like_SRD, dtype=parts[0].dtype)
    for depth, part in enumerate(parts):
        merged_SRD = merged_SRD.masked_scatter((batch.depths == depth)[:, :, None], part)
    return merged_SRD

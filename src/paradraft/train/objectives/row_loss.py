"""The loss of a batch of rows, computed in chunks, so that the logits of all rows are never in memory at once.

Shape letters: S groups of samples, N tokens of the longest, R rows of a batch, X all of these, M rows that have a
label, m some of them, D width of the model, P tokens of the texts, E width of the teacher, K depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.chunks import sum_in_chunks
from paradraft.train.objectives.losses import IGNORED, Divergence, cross_entropy, divergence
from paradraft.train.objectives.selection import Selecting, selection_loss
from paradraft.train.objectives.teacher import Teacher
from paradraft.train.objectives.weightings import ChainTable, Weighting


@dataclass(frozen=True, kw_only=True)
class RowLoss:
    """What a row learns, and how it is weighted among the others.

    Args:
        kind: divergence from the teacher; None learns the tokens of the text.
        hard_share: weight of the cross-entropy with the text's tokens beside the divergence.
        weighting: None weights rows by their depth alone.
    """

    kind: Divergence | None
    hard_share: float = 0.0
    weighting: Weighting | None = None

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss or the weights read a teacher's probabilities."""
        return self.kind is not None or (self.weighting is not None and self.weighting.needs_teacher)

    @property
    def unweighted(self) -> RowLoss:
        """With rows weighted by their depth alone, as in evaluations: those of drafters compare then."""
        return replace(self, weighting=None)

    def of(self, logits_mV: Tensor, labels_m: Tensor, teacher_mV: Tensor | None) -> Tensor:
        """`[m]` losses of rows."""
        if self.kind is None or teacher_mV is None:
            return cross_entropy(logits_mV, labels_m)
        soft_m = divergence(logits_mV, teacher_mV, self.kind)
        return soft_m + self.hard_share * cross_entropy(logits_mV, labels_m) if self.hard_share else soft_m


class Losses(NamedTuple):
    """The losses of a batch.

    Args:
        total: the weighted sum over the rows.
        right: `[K]` rows of each depth predicted correctly.
        weights: `[S, R]` weights of the rows, 0 without a label.
    """

    total: Tensor
    right: Tensor
    weights: Tensor

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `Trainee.objective`."""
        return self.total, self.right, self.weights.sum()


def loss_of_rows(
    hidden_SRD: Tensor,
    batch: TrainingBatch,
    weights_K: Tensor,
    row_loss: RowLoss,
    *,
    head: Callable[[Tensor, Tensor], Tensor],
    teacher: Teacher | None,
    chunk: int,
    trained: Sequence[Tensor],
    read_SNE: Tensor | None = None,
    select: Selecting | None = None,
) -> Losses:
    """Sums the losses of all rows that have a label.

    Args:
        hidden_SRD: the drafter's states of all rows.
        weights_K: weight of a row of each depth.
        head: turns states `[m, D]` of rows of depths `[m]` into logits `[m, V]`.
        teacher: read if the loss or the weighting needs one.
        chunk: most rows whose logits are in memory at a time, or those of one chain.
        trained: all trained weights, some of which `head` may read.
        read_SNE: the teacher's states of the texts, if known.
        select: scores of the likeliest tokens, which have a loss too and make the prediction. Weightings by
            probabilities read the logits.

    Raises:
        ValueError: there is no teacher, and the loss or the weighting needs one.
    """
    expected = None
    if row_loss.needs_teacher:
        if teacher is None:
            raise ValueError("this loss or weighting needs a teacher's probabilities, and there is no teacher")
        expected = _Expected(teacher, teacher.read(batch.texts) if read_SNE is None else read_SNE, _tokens(batch))
    is_labelled_SR = batch.labels != IGNORED
    base_SR = weights_K[batch.depths] * is_labelled_SR
    if not bool(is_labelled_SR.any()):
        nothing = sum((weight.sum() * 0.0 for weight in trained), hidden_SRD.sum() * 0.0)
        return Losses(nothing, torch.zeros_like(weights_K), base_SR)
    loss = _ChunkLoss(batch, base_SR.flatten(), row_loss, head, expected, select)
    if row_loss.weighting is None:
        order_M = in_text_order(batch)
        chunks = order_M.split(chunk)
    else:
        order_M = _by_chain(batch)
        chunks = whole_chains(order_M, _chains(batch)[order_M], chunk)
    total, values_M2 = sum_in_chunks(loss, hidden_SRD.flatten(0, 1), chunks, trained)
    right_M, weights_M = values_M2.unbind(1)
    right_K = torch.zeros_like(weights_K).index_add(0, batch.depths.flatten()[order_M], right_M.to(weights_K.dtype))
    weights_X = torch.zeros_like(base_SR).flatten().index_copy(0, order_M, weights_M.to(base_SR.dtype))
    return Losses(total, right_K, weights_X.view_as(base_SR))


class _Expected(NamedTuple):
    """The teacher's expectations.

    Args:
        states: `[S, N, E]` of the texts.
        tokens: `[X]` index of the token after which each row predicts.
    """

    teacher: Teacher
    states: Tensor
    tokens: Tensor

    def logits(self, rows_m: Tensor, width: int) -> Tensor:
        """`[m, width]` of rows; its head reads the states of tokens that several rows share once."""
        token_P, which_m = self.tokens[rows_m].unique(return_inverse=True)
        return self.teacher.expects(self.states.flatten(0, 1)[token_P], width)[which_m]


class _ChunkLoss:
    """The loss of some rows, for `sum_in_chunks`; see `loss_of_rows`."""

    def __init__(
        self,
        batch: TrainingBatch,
        base_X: Tensor,
        row_loss: RowLoss,
        head: Callable[[Tensor, Tensor], Tensor],
        expected: _Expected | None,
        select: Selecting | None,
    ) -> None:
        self._labels_X, self._depths_X, self._chains_X = batch.labels.flatten(), batch.depths.flatten(), _chains(batch)
        self._base_X, self._row_loss, self._head, self._expected = base_X, row_loss, head, expected
        self._select, self._first = select, batch.first

    def __call__(self, hidden_mD: Tensor, rows_m: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the rows' losses, and `[m, 2]`: whether the drafter drafts the label, and the weight."""
        labels_m, depths_m, weights_m = self._labels_X[rows_m], self._depths_X[rows_m], self._base_X[rows_m]
        logits_mV = self._head(hidden_mD, depths_m)
        plain_mV = logits_mV.detach()
        right_m = plain_mV.gather(1, labels_m[:, None])[:, 0] >= plain_mV.amax(-1)
        teacher_mV = None if self._expected is None else self._expected.logits(rows_m, logits_mV.shape[-1])
        loss_m = self._row_loss.of(logits_mV, labels_m, teacher_mV)
        if self._select is not None:
            alone, learnt_mV = replace(self._row_loss, hard_share=0.0), teacher_mV if self._row_loss.kind else None
            chosen_m, best_m = selection_loss(self._select, hidden_mD, logits_mV, labels_m, learnt_mV, alone.of)
            loss_m, right_m = loss_m + chosen_m, best_m == labels_m
        if self._row_loss.weighting is not None:
            chains_m = self._chains_X[rows_m].unique(return_inverse=True)[1]
            table = ChainTable(
                chains_m, depths_m - self._first, weights_m, plain_mV, labels_m, right_m, teacher_mV
            )  # fmt: skip
            weights_m = table.rows(self._row_loss.weighting(table)).to(weights_m.dtype)
        return (weights_m * loss_m).sum(), torch.stack([right_m.to(weights_m.dtype), weights_m], dim=1)


def in_text_order(batch: TrainingBatch) -> Tensor:
    """`[M]` indices of the rows with a label, in text order: rows of several depths that predict the same token are
    adjacent, so that the teacher's head runs once for them."""
    rows_M = (batch.labels.flatten() != IGNORED).nonzero()[:, 0]
    return rows_M[_tokens(batch)[rows_M].argsort(stable=True)]


def _by_chain(batch: TrainingBatch) -> Tensor:
    """`[M]` indices of the rows with a label, chain by chain."""
    rows_M = (batch.labels.flatten() != IGNORED).nonzero()[:, 0]
    return rows_M[_chains(batch)[rows_M].argsort(stable=True)]


def whole_chains(rows_M: Tensor, chains_M: Tensor, chunk: int) -> Sequence[Tensor]:
    """Splits rows into chunks of whole chains, of at most `chunk` rows unless a chain alone has more.

    >>> [part.tolist() for part in whole_chains(torch.arange(6), torch.tensor([3, 3, 5, 7, 7, 7]), 4)]
    [[0, 1, 2], [3, 4, 5]]
    """
    sizes = [0]
    for rows in chains_M.unique_consecutive(return_counts=True)[1].tolist():
        if sizes[-1] and sizes[-1] + rows > chunk:
            sizes.append(0)
        sizes[-1] += rows
    return rows_M.split(sizes)


def _tokens(batch: TrainingBatch) -> Tensor:
    """`[X]` index, among those of all groups, of the token after which each row predicts."""
    groups = torch.arange(len(batch.labels), device=batch.labels.device)[:, None]
    return (groups * batch.texts.tokens.shape[1] + batch.text_indices).flatten()


def _chains(batch: TrainingBatch) -> Tensor:
    """`[X]` index, among all tokens, of each row's anchor: the rows of a chain have the same."""
    return _tokens(batch) - batch.depths.flatten()

"""The loss of a batch of rows, in pieces: no tensor of all rows' logits is ever whole.

Shape letters: S groups of samples, R rows of a batch, M rows that have a label, m some of them, D
width of the model, P places of the texts, E width of the teacher, K depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paradraft.drafters.parts.previous_token import PreviousTokenHead
from paradraft.models.output_head import finished, logits_of
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.losses import IGNORED, Divergence, cross_entropy, divergence
from paradraft.train.objectives.previous_token import chain_probabilities, corrected
from paradraft.train.objectives.rows import attention_mask
from paradraft.train.objectives.teacher import Teacher

LOGITS = 2**26
"""Most logits that are in memory at a time: 256 MB in float32, and as much again for each step of the loss."""


class Objective(nn.Module):
    """The loss of a causal LM that reads all rows in one pass, as one module, so that whatever spreads models over
    devices can wrap it.

    Args:
        model: the drafter in training.
        teacher: whose probabilities to learn; None learns the tokens of the text.
        kind: how to compare with the teacher.
        previous: tells masks the tokens before them; None if none does.
        unused: ids that are no tokens, which it does not correct: engines that do not know it must not draft them.
        chain_weight: rows weigh the probability of the tokens before them to this power; needs a teacher if not 0.
        bf16: compute in bf16; losses are computed in float32.
        logits: most logits in memory at a time; more are computed again in the backward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        teacher: Teacher | None = None,
        kind: Divergence = "forward_kl",
        previous: PreviousTokenHead | None = None,
        unused: Sequence[int] = (),
        chain_weight: float = 0.0,
        bf16: bool = False,
        logits: int = LOGITS,
    ) -> None:
        super().__init__()
        self.model = model
        self.previous = previous
        self.unused = list(unused)
        self.chain_weight = chain_weight
        self.kind = kind
        self.bf16 = bf16
        self.chunk = max(logits // model.config.vocab_size, 1)
        self._teacher = (teacher,)  # hidden from `nn.Module`: it is not trained, saved or spread

    @property
    def teacher(self) -> Teacher | None:
        """The teacher, or None."""
        return self._teacher[0]

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor]:
        """One training pass.

        Args:
            batch: what to learn.
            weights_K: `[K]` what a row of each depth weighs, from `row_weights`.

        Returns:
            The weighted sum of the rows' losses, and `[K]` rows of each depth predicted correctly.
        """
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            hidden_SRD = self.model.model(
                input_ids=batch.tokens,
                attention_mask=attention_mask(batch.rows, self.model),
                position_ids=batch.positions,
                use_cache=False,
            ).last_hidden_state
            if self.previous is not None:
                embeddings_SND = self.model.get_input_embeddings()(batch.texts.tokens)
                both = corrected(self.previous, hidden_SRD, batch, embeddings_SND), hidden_SRD
                hidden_SRD = torch.cat(both, dim=-1)
            return loss_of_rows(
                hidden_SRD,
                batch,
                weights_K,
                head=lambda hidden_mD, depths_m: self._logits(hidden_mD),
                teacher=self.teacher,
                kind=self.kind,
                chunk=self.chunk,
                chain_weight=self.chain_weight,
            )

    def _logits(self, states: Tensor) -> Tensor:
        """The logits `[m, V]` of some rows, of states `[m, D]`, or `[m, 2 D]` corrected and as they were.

        Those of ids that are no tokens have the probability that an engine without the head gives to them.
        """
        lm_head = self.model.lm_head
        if self.previous is None:
            return logits_of(self.model, states)
        corrected_mD, plain_mD = states.chunk(2, dim=-1)
        logits_mV = logits_of(self.model, corrected_mD)
        if not self.unused:
            return logits_mV
        with torch.no_grad():
            plain_mV, is_used_V = logits_of(self.model, plain_mD), torch.ones(logits_mV.shape[1], dtype=torch.bool)
            is_used_V[self.unused] = False
            raised_m1 = _log_sum(logits_mV, is_used_V) - _log_sum(plain_mV, is_used_V)
        if isinstance(lm_head, nn.Linear):
            bias = None if lm_head.bias is None else lm_head.bias[self.unused]
            products = nn.functional.linear(plain_mD, lm_head.weight[self.unused], bias)
            unused = finished(products, self.model.config)
        else:  # adapters train the rows of masks
            unused = logits_of(self.model, plain_mD)[:, self.unused]
        logits_mV[:, self.unused] = (unused + raised_m1).to(logits_mV.dtype)
        return logits_mV


def _log_sum(logits_mV: Tensor, is_used_V: Tensor) -> Tensor:
    """`[m, 1]` the logarithm of the sum over tokens."""
    return logits_mV[:, is_used_V].float().logsumexp(1, keepdim=True)


def loss_of_rows(
    hidden_SRD: Tensor,
    batch: TrainingBatch,
    weights_K: Tensor,
    *,
    head: Callable[[Tensor, Tensor], Tensor],
    teacher: Teacher | None,
    kind: Divergence,
    chunk: int,
    read_SNE: Tensor | None = None,
    chain_weight: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of all rows that have a label.

    Args:
        hidden_SRD: `[S, R, D]` what the drafter computed for each row.
        batch: the rows.
        weights_K: `[K]` what a row of each depth weighs.
        head: turns hidden states `[m, D]` of rows of depths `[m]` into logits `[m, V]`.
        teacher: whose probabilities to learn; None learns the tokens of the text.
        kind: how to compare with the teacher.
        chunk: most rows whose logits are in memory at a time; with more rows than that, logits are computed again in
            the backward pass.
        read_SNE: `[S, N, E]` what the teacher has read of the texts; it reads them if this is not given.
        chain_weight: see `Objective`.

    Returns:
        The weighted sum of the rows' losses, and `[K]` rows of each depth predicted correctly.
    """

    def compare(
        hidden_mD: Tensor, depths_m: Tensor, labels_m: Tensor, read_PE: Tensor | None, which_m: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each row, and whether its likeliest token is the label."""
        logits_mV = head(hidden_mD, depths_m)
        right_m = logits_mV.detach().gather(1, labels_m[:, None])[:, 0] >= logits_mV.detach().amax(-1)
        if teacher is None or read_PE is None:
            return cross_entropy(logits_mV, labels_m), right_m
        expected_mV = teacher.expects(read_PE, logits_mV.shape[-1])[which_m]
        return divergence(logits_mV, expected_mV, kind), right_m

    if teacher is not None and read_SNE is None:
        read_SNE = teacher.read(batch.texts)
    order_M = _labelled_by_place(batch)
    losses, right = [], []
    for rows_m in order_M.split(chunk):
        labels_m, depths_m = batch.labels.flatten()[rows_m], batch.depths.flatten()[rows_m]
        read = _read(None if teacher is None else read_SNE, batch, rows_m)
        inputs = hidden_SRD.flatten(0, 1)[rows_m], depths_m, labels_m, *read
        if len(order_M) > chunk:
            loss_m, right_m = checkpoint(compare, *inputs, use_reentrant=False)
        else:
            loss_m, right_m = compare(*inputs)
        losses.append(loss_m)
        right.append(right_m)
    depths_M = batch.depths.flatten()[order_M]
    if not losses:
        return hidden_SRD.sum() * 0.0, torch.zeros_like(weights_K)
    right_K = torch.zeros_like(weights_K).index_add(0, depths_M, torch.cat(right).to(weights_K.dtype))
    weights_M = weights_K[depths_M]
    if chain_weight and teacher is not None and read_SNE is not None:
        weights_M = weights_M * chain_probabilities(teacher, read_SNE, batch).flatten()[order_M] ** chain_weight
    return (weights_M * torch.cat(losses)).sum(), right_K


def _labelled_by_place(batch: TrainingBatch) -> Tensor:
    """`[M]` indices, into all rows, of those that have a label, in the order of the texts: rows of several depths that
    predict the same token come together, so that the teacher's head runs once for them."""
    rows_M = (batch.labels.flatten() != IGNORED).nonzero()[:, 0]
    group_M = rows_M // batch.labels.shape[1]
    place_M = group_M * batch.texts.tokens.shape[1] + batch.places.flatten()[rows_M]
    return rows_M[place_M.argsort(stable=True)]


def _read(read_SNE: Tensor | None, batch: TrainingBatch, rows_m: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`[P, E]` what the teacher read at the places of some rows, each once; `[m]` which of them each row asks for."""
    if read_SNE is None:
        return None, None
    group_m = rows_m // batch.labels.shape[1]
    place_m = group_m * batch.texts.tokens.shape[1] + batch.places.flatten()[rows_m]
    place_P, which_m = place_m.unique(return_inverse=True)
    return read_SNE.flatten(0, 1)[place_P], which_m

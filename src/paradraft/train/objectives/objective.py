"""The loss of a batch of rows, computed in chunks, so that the logits of all rows are never in memory at once.

The previous-token head (`paradraft.drafters.parts.previous_token`) corrects the states before the loss. The tokens
between a row's anchor and the row are those of the text, as if they had been drafted.

Shape letters: S groups of samples, N tokens of the longest, R rows of a batch, M rows that have a label, m some of
them, D width of the model, X rank of the previous-token head, P tokens of the texts, E width of the teacher, K depths,
V vocabulary.
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
from paradraft.train.objectives.rows import FILLING, attention_mask
from paradraft.train.objectives.teacher import Teacher

LOGITS = 2**26
"""Most logits in memory at a time: 256 MB in float32, and as much again for each step of the loss."""


class Objective(nn.Module):
    """A causal LM that reads all rows in one pass, and its loss, as one module that DDP and FSDP can wrap.

    Args:
        teacher: its distribution is learnt; None learns the tokens of the text.
        unused: ids that are no tokens, which the previous-token head does not correct: engines without the head must
            not draft them.
        chain_weight: rows are weighted by the probability of the tokens before them to this power; needs a teacher.
        bf16: compute in bf16; losses are computed in float32.
        logits: most logits in memory at a time; more are recomputed in the backward pass.
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
        self._teacher = (teacher,)  # in a tuple, hidden from `nn.Module`: it is not trained, saved or sharded

    @property
    def teacher(self) -> Teacher | None:
        """The frozen teacher, if any."""
        return self._teacher[0]

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the rows' losses, weighted by depth, and `[K]` rows of each depth predicted correctly."""
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
        """`[m, V]` logits from states `[m, D]`, or `[m, 2 D]`: corrected and uncorrected.

        Unused ids keep the probability that an engine without the previous-token head gives them.
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
    """Sums the losses of all rows that have a label.

    Args:
        hidden_SRD: the drafter's states of all rows.
        weights_K: weight of a row of each depth.
        head: turns states `[m, D]` of rows of depths `[m]` into logits `[m, V]`.
        chunk: most rows whose logits are in memory at a time; with more rows, logits are recomputed in the backward
            pass.
        read_SNE: the teacher's states of the texts, if known.

    Returns:
        The weighted sum, and `[K]` rows of each depth predicted correctly.
    """

    def compare(
        hidden_mD: Tensor, depths_m: Tensor, labels_m: Tensor, read_PE: Tensor | None, which_m: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss of each row, and whether its likeliest token is the label."""
        logits_mV = head(hidden_mD, depths_m)
        right_m = logits_mV.detach().gather(1, labels_m[:, None])[:, 0] >= logits_mV.detach().amax(-1)
        if teacher is None or read_PE is None:
            return cross_entropy(logits_mV, labels_m), right_m
        expected_mV = teacher.expects(read_PE, logits_mV.shape[-1])[which_m]
        return divergence(logits_mV, expected_mV, kind), right_m

    if teacher is not None and read_SNE is None:
        read_SNE = teacher.read(batch.texts)
    order_M = _labelled_in_text_order(batch)
    losses, right = [], []
    for rows_m in order_M.split(chunk):
        labels_m, depths_m = batch.labels.flatten()[rows_m], batch.depths.flatten()[rows_m]
        states = _teacher_states(None if teacher is None else read_SNE, batch, rows_m)
        inputs = hidden_SRD.flatten(0, 1)[rows_m], depths_m, labels_m, *states
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


def _labelled_in_text_order(batch: TrainingBatch) -> Tensor:
    """`[M]` indices of the rows with a label, in text order: rows of several depths that predict the same token are
    adjacent, so that the teacher's head runs once for them."""
    rows_M = (batch.labels.flatten() != IGNORED).nonzero()[:, 0]
    group_M = rows_M // batch.labels.shape[1]
    token_M = group_M * batch.texts.tokens.shape[1] + batch.text_indices.flatten()[rows_M]
    return rows_M[token_M.argsort(stable=True)]


def _teacher_states(
    read_SNE: Tensor | None, batch: TrainingBatch, rows_m: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Returns `[P, E]`, the teacher's distinct states for some rows, and `[m]`, the index of each row's state."""
    if read_SNE is None:
        return None, None
    group_m = rows_m // batch.labels.shape[1]
    token_m = group_m * batch.texts.tokens.shape[1] + batch.text_indices.flatten()[rows_m]
    token_P, which_m = token_m.unique(return_inverse=True)
    return read_SNE.flatten(0, 1)[token_P], which_m


def corrected(head: PreviousTokenHead, hidden_SRD: Tensor, batch: TrainingBatch, embeddings_SND: Tensor) -> Tensor:
    """Adds the head's corrections to the states of masks; the states of real tokens stay."""
    (S, R), N = batch.depths.shape, batch.texts.tokens.shape[1]
    samples = torch.arange(S, device=batch.text_indices.device)[:, None]
    before, indices = batch.before(), (samples * N + batch.text_indices).flatten()
    depths = batch.depths.masked_fill(batch.documents == FILLING, 0).flatten()
    hidden, tokens_PX = hidden_SRD.flatten(0, 1), head.token(embeddings_SND.flatten(0, 1))
    index_of = torch.empty_like(before)  # index of a row among the rows of its depth
    masks, memories = [], []
    memory_mX = None
    for depth in range(1, int(depths.max()) + 1):
        rows_m = (depths == depth).nonzero()[:, 0]
        index_of[rows_m] = torch.arange(len(rows_m), device=rows_m.device)
        read_mX = head.state(hidden[rows_m]) + tokens_PX[indices[rows_m]]
        memory_mX = head.remember(read_mX, None if memory_mX is None else memory_mX[index_of[before[rows_m]]])
        masks.append(rows_m)
        memories.append(memory_mX)
    if not memories:
        return hidden_SRD
    corrections = head.correction(torch.cat(memories))
    return hidden.index_add(0, torch.cat(masks), corrections.to(hidden.dtype)).unflatten(0, (S, R))


@torch.no_grad()
def chain_probabilities(teacher: Teacher, read_SNE: Tensor, batch: TrainingBatch) -> Tensor:
    """`[S, R]` probability that the teacher gives to the tokens between each row's anchor and the row; 1 for real
    tokens.

    A mask's prediction counts in decoding only if all tokens before it were accepted (An et al. 2026, PARD-2).
    """
    S, N = batch.texts.tokens.shape
    nats = torch.zeros(S, N, device=read_SNE.device)
    for group in range(S):
        logits_NV = teacher.expects(read_SNE[group], teacher.model.config.vocab_size)
        labels_N = batch.texts.tokens[group].roll(-1)
        nats[group] = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none")
    before = torch.nn.functional.pad(nats.cumsum(1), (1, 0)).double().flatten()
    index = batch.text_indices + torch.arange(S, device=read_SNE.device)[:, None] * (N + 1)
    return (before[index - batch.depths] - before[index]).exp().float()

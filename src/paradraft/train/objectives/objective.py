"""PARD in training: a causal LM that reads the rows of a batch, and its loss.

The previous-token head (`paradraft.drafters.parts.path_heads.previous_token`) corrects the states before the loss. The
tokens between a row's anchor and the row are those of the text, as if they had been drafted.

Shape letters: S groups of samples, N tokens of the longest, R rows of a batch, M rows that have a label, m some of
them, D width of the model, X rank of the previous-token head, P tokens of the texts, E width of the teacher, K depths,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenHead
from paradraft.formats.vocab_map import VocabMap
from paradraft.models.output_head import finished, logits_of
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.chunks import rows_at_once
from paradraft.train.objectives.features import FeatureCache
from paradraft.train.objectives.row_loss import RowLoss, loss_of_rows
from paradraft.train.objectives.rows import FILLING, attention_mask
from paradraft.train.objectives.teacher import Teacher


class Objective(nn.Module):
    """A causal LM that reads all rows in one pass, and its loss, as one module that DDP and FSDP can wrap.

    Args:
        teacher: of `row_loss`; None without one.
        unused: ids that are no tokens, which the previous-token head does not correct: engines without the head must
            not draft them.
        vocab_map: of the output head, if it has fewer rows than the embedding.
        features: of the teacher's states after the final norm, and then of others that `added` reads; None computes
            the former in every batch.
        added: what the inputs of rows have beside their embeddings: a function of the batch and the states
            `[S, N, layers * E]` of `features` to `[S, R, D]`.
        bf16: compute in bf16; losses are computed in float32.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        teacher: Teacher | None = None,
        row_loss: RowLoss | None = None,
        previous: PreviousTokenHead | None = None,
        unused: Sequence[int] = (),
        vocab_map: VocabMap | None = None,
        features: FeatureCache | None = None,
        added: nn.Module | None = None,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.added = added
        self.previous = previous
        self.vocab_map = vocab_map
        self.unused = list(unused)
        if vocab_map is not None:
            ids = torch.tensor(self.unused, device=vocab_map.to_target.device)
            self.unused = [row for row in vocab_map.rows_of(ids).tolist() if row >= 0]
            teacher = None if teacher is None else teacher.trimmed(vocab_map)
        self.row_loss = row_loss or RowLoss(kind=None)
        self.bf16 = bf16
        self.chunk = rows_at_once(len(model.get_output_embeddings().weight), model.device)
        self._teacher = (teacher,)  # in a tuple, hidden from `nn.Module`: it is not trained, saved or sharded
        self._features = features

    @property
    def teacher(self) -> Teacher | None:
        """The frozen teacher, if any."""
        return self._teacher[0]

    def forward(self, batch: TrainingBatch, weights_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Trainee.objective`."""
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            states_SNX = None if self._features is None else self._features.states(batch.texts)
            hidden_SRD = self.model.model(
                **self._inputs(batch, states_SNX),
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
                batch if self.vocab_map is None else batch.labelled_by_rows(self.vocab_map),
                weights_K,
                self.row_loss if self.training else self.row_loss.unweighted,
                head=lambda hidden_mD, depths_m: self._logits(hidden_mD),
                teacher=self.teacher,
                chunk=self.chunk,
                read_SNE=None if states_SNX is None else states_SNX[..., : self._width],
                trained=[weight for weight in self.parameters() if weight.requires_grad],
            ).sums

    def _inputs(self, batch: TrainingBatch, states_SNX: Tensor | None) -> dict[str, Tensor]:
        if self.added is None:
            return {"input_ids": batch.tokens}
        return {"inputs_embeds": self.model.get_input_embeddings()(batch.tokens) + self.added(batch, states_SNX)}

    @property
    def _width(self) -> int | None:
        return None if self.teacher is None else int(self.teacher.model.config.hidden_size)

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

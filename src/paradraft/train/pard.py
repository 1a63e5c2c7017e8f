"""PARD training: turns a causal LM into one that also predicts behind mask tokens.

Shape letters: S groups of samples, R rows of a batch, M rows that have a label, m some of them, D
width of the model, P places of the texts, E width of the teacher, K depths, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.formats.pard import check_ends_nothing, declare_masks, declared_mask_id
from paradraft.models.tokenization import text_of
from paradraft.train.batch import Batch
from paradraft.train.losses import IGNORED, Divergence, cross_entropy, divergence
from paradraft.train.rows import attention_mask
from paradraft.train.teacher import Teacher
from paradraft.train.vocabulary import end_ids, free_id, resize, set_to_mean, used_rows

LOGITS = 2**26
"""Most logits that are in memory at a time: 256 MB in float32, and as much again for each step of the loss."""


class Objective(nn.Module):
    """The loss of a batch, as one module, so that whatever spreads models over devices can wrap it.

    Args:
        model: the drafter in training.
        teacher: whose probabilities to learn; None learns the tokens of the text.
        kind: how to compare with the teacher.
        bf16: compute in bf16; losses are computed in float32.
        logits: most logits in memory at a time; more are computed again in the backward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        teacher: Teacher | None = None,
        kind: Divergence = "forward_kl",
        bf16: bool = False,
        logits: int = LOGITS,
    ) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.bf16 = bf16
        self.chunk = max(logits // model.config.vocab_size, 1)
        self._teacher = (teacher,)  # hidden from `nn.Module`: it is not trained, saved or spread

    @property
    def teacher(self) -> Teacher | None:
        """Whose probabilities are learnt, if anybody's."""
        return self._teacher[0]

    def forward(self, batch: Batch, weights_K: Tensor) -> tuple[Tensor, Tensor]:
        """One training pass.

        Args:
            batch: what to learn.
            weights_K: `[K]` what a row of each depth weighs, from `row_weights`.

        Returns:
            The weighted sum of the rows' losses, and `[K]` rows of each depth predicted correctly.
        """
        teacher = self.teacher
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            hidden_SRD = self.model.model(
                input_ids=batch.tokens,
                attention_mask=attention_mask(batch.rows, self.model),
                position_ids=batch.positions,
                use_cache=False,
            ).last_hidden_state
            read_SNE = None if teacher is None else teacher.read(batch.texts)
            order_M = _labelled_by_place(batch)
            losses, right = [], []
            for rows_m in order_M.split(self.chunk):
                labels_m = batch.labels.flatten()[rows_m]
                inputs = hidden_SRD.flatten(0, 1)[rows_m], labels_m, *_read(read_SNE, batch, rows_m)
                if len(order_M) > self.chunk:
                    loss_m, right_m = checkpoint(self._compare, *inputs, use_reentrant=False)
                else:
                    loss_m, right_m = self._compare(*inputs)
                losses.append(loss_m)
                right.append(right_m)
        depths_M = batch.depths.flatten()[order_M]
        if not losses:
            return hidden_SRD.sum() * 0.0, torch.zeros_like(weights_K)
        right_K = torch.zeros_like(weights_K).index_add(0, depths_M, torch.cat(right).to(weights_K.dtype))
        return (weights_K[depths_M] * torch.cat(losses)).sum(), right_K

    def _compare(
        self, hidden_mD: Tensor, labels_m: Tensor, read_PE: Tensor | None, which_m: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each of some rows, and whether its likeliest token is the label."""
        teacher = self.teacher
        logits_mV = self.model.lm_head(hidden_mD)
        right_m = logits_mV.detach().argmax(-1) == labels_m
        if teacher is None or read_PE is None:
            return cross_entropy(logits_mV, labels_m), right_m
        expected_mV = teacher.expects(read_PE, logits_mV.shape[-1])[which_m]
        return divergence(logits_mV, expected_mV, self.kind), right_m


def _labelled_by_place(batch: Batch) -> Tensor:
    """`[M]` indices, into all rows, of those that have a label, in the order of the texts: rows of several depths that
    predict the same token come together, so that the teacher's head runs once for them."""
    rows_M = (batch.labels.flatten() != IGNORED).nonzero()[:, 0]
    group_M = rows_M // batch.labels.shape[1]
    place_M = group_M * batch.texts.tokens.shape[1] + batch.places.flatten()[rows_M]
    return rows_M[place_M.argsort(stable=True)]


def _read(read_SNE: Tensor | None, batch: Batch, rows_m: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`[P, E]` what the teacher read at the places of some rows, each once; `[m]` which of them each row asks for."""
    if read_SNE is None:
        return None, None
    group_m = rows_m // batch.labels.shape[1]
    place_m = group_m * batch.texts.tokens.shape[1] + batch.places.flatten()[rows_m]
    place_P, which_m = place_m.unique(return_inverse=True)
    return read_SNE.flatten(0, 1)[place_P], which_m


def add_mask_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_id: int | None = None, *, masks: int = 1
) -> int:
    """Chooses the mask token and makes its embedding the mean of all others.

    One id serves all depths. A model that already names one keeps it. Otherwise an id that no text
    uses is taken (`free_id`), and where there is none, a row is added. The id is written into the
    model's config as `pard_token`, `mask_token_id` and `spd_type`, which engines read.

    Args:
        model: changed in place.
        tokenizer: tells which rows are in use.
        mask_id: take this id instead.
        masks: ids from there on that serve one depth each, the last all deeper ones. The config says how
            many as `pard_masks`, which only paradraft reads.

    Raises:
        ValueError: `mask_id` is outside the embedding, a text or the end of texts, or so many masks find no room behind
            the tokenizer's last id.

    Returns:
        The mask token's id.
    """
    known = declared_mask_id(model.config)
    rows, used = model.get_input_embeddings().weight.shape[0], used_rows(tokenizer)
    if mask_id is not None and not 0 <= mask_id < rows:
        raise ValueError(f"mask_token_id={mask_id} is outside the embedding of {rows} rows: use a free one of them")
    if mask_id is not None and (text := text_of(mask_id, tokenizer)) is not None:
        raise ValueError(f"mask_token_id={mask_id} is {text!r}, which could then not be said: use an id without a text")
    chosen = known if mask_id is None else mask_id
    if chosen is None:
        chosen = free_id(tokenizer, rows, end_ids(model))
    if chosen is None:
        chosen = max(rows, used)
        resize(model, chosen + 1, used)
    if masks > 1 and not used <= chosen <= model.get_input_embeddings().weight.shape[0] - masks:
        raise ValueError(
            f"distinct_masks: {masks} ids from {chosen} on are not all free in the embedding: lower k or share one mask"
        )
    ends = {tokenizer.eos_token_id, *end_ids(model)}
    check_ends_nothing(range(chosen, chosen + masks), ends, tokenizer, model.name_or_path or "the model")
    if chosen != known:
        set_to_mean(model, slice(chosen, chosen + masks), used)
    declare_masks(model.config, chosen, masks)
    return int(chosen)

"""Trains a PARD drafter: turns a causal LM into one that also predicts behind mask tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.drafters.pard import declared_mask_id
from paradraft.train.cod import conditional_drop
from paradraft.train.data import Sample
from paradraft.train.losses import IGNORED
from paradraft.train.rows import Rows, attention_rule
from paradraft.train.vocabulary import end_ids, free_id, resize, set_to_mean, used_rows


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of several samples, filled up to the same number.

    Args:
        tokens: `[S, R]` input ids: the real token, or the mask.
        positions: `[S, R]` position ids.
        depths: `[S, R]` depths.
        labels: `[S, R]` the next token, or `IGNORED`.
        sees: `[S, 1, R, R]` the attention rule.
        texts: `[S, N]` the samples themselves, without their last token, filled up on the right with 0;
            N is the longest's length.
    """

    tokens: Tensor
    positions: Tensor
    depths: Tensor
    labels: Tensor
    sees: Tensor
    texts: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def collate(
    samples: list[Sample], mask_id: int | None, *, k: int, r: float, r_min: float, generator: torch.Generator
) -> Batch:
    """Drops rows by COD and puts the rest of several samples side by side.

    Args:
        samples: what to learn.
        mask_id: the mask token; None where k is 1 and no row holds one.
        k: depths.
        r: as in `conditional_drop`.
        r_min: as in `conditional_drop`.
        generator: source of the random choice of rows.

    Memory is that of the kept rows: `[S, R, R]` booleans with R about 3.4 N at the defaults, never
    (K N)².
    """
    kept = []
    for sample in samples:
        is_next_label = torch.tensor(sample.is_label[1:])
        n = len(is_next_label)
        kept.append(conditional_drop(n, k=k, r=r, r_min=r_min, generator=generator, may_draft=is_next_label))
    size = max(len(rows.position) for rows in kept)
    S = len(samples)
    tokens, positions, depths = (torch.zeros(S, size, dtype=torch.long) for _ in range(3))
    labels = torch.full((S, size), IGNORED)
    texts = torch.zeros(S, max(len(sample.tokens) for sample in samples) - 1, dtype=torch.long)
    # A filled-up row sees itself alone, so that no softmax is over nothing.
    sees = torch.eye(size, dtype=torch.bool).repeat(S, 1, 1)
    for s, (sample, rows) in enumerate(zip(samples, kept, strict=True)):
        R = len(rows.position)
        real = torch.tensor(sample.tokens)
        texts[s, : len(real) - 1] = real[:-1]
        is_label = torch.tensor(sample.is_label)
        tokens[s, :R] = (
            real[rows.position] if mask_id is None else torch.where(rows.depth == 0, real[rows.position], mask_id)
        )
        positions[s, :R] = rows.position
        depths[s, :R] = rows.depth
        labels[s, :R] = torch.where(is_label[rows.position + 1], real[rows.position + 1], IGNORED)
        sees[s, :R, :R] = attention_rule(Rows(position=rows.position, depth=rows.depth))
    return Batch(tokens=tokens, positions=positions, depths=depths, labels=labels, sees=sees[:, None], texts=texts)


def forward(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """One training pass over a batch.

    Returns:
        `[M, V]` logits, `[M]` labels and `[M]` depths of the M rows that have a label.
    """
    sees: Tensor = batch.sees
    if model.config._attn_implementation == "eager":
        # Eager attention adds the mask to the scores; booleans would be taken for 0 and 1.
        sees = torch.zeros_like(sees, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    hidden = model.model(
        input_ids=batch.tokens, attention_mask=sees, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    labelled = batch.labels != IGNORED
    return model.lm_head(hidden[labelled]), batch.labels[labelled], batch.depths[labelled]


def add_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_id: int | None = None) -> int:
    """Chooses the mask token and makes its embedding the mean of all others.

    One id serves all depths. A model that already names one keeps it. Otherwise an id that no text
    uses is taken (`free_id`), and where there is none, a row is added. The id is written into the
    model's config as `pard_token`, `mask_token_id` and `spd_type`, which engines read.

    Args:
        model: changed in place.
        tokenizer: tells which rows are in use.
        mask_id: take this id instead.

    Raises:
        ValueError: `mask_id` is outside the embedding.

    Returns:
        The mask token's id.
    """
    known = declared_mask_id(model.config)
    rows, used = model.get_input_embeddings().weight.shape[0], used_rows(tokenizer)
    if mask_id is not None and not 0 <= mask_id < rows:
        raise ValueError(f"mask_token_id={mask_id} is outside the embedding of {rows} rows")
    chosen = known if mask_id is None else mask_id
    if chosen is None:
        chosen = free_id(tokenizer, rows, end_ids(model))
    if chosen is None:
        chosen = max(rows, used)
        resize(model, chosen + 1, used)
    if chosen != known:
        set_to_mean(model, chosen, used)
    model.config.pard_token = model.config.mask_token_id = chosen
    model.config.spd_type = "pard"
    return int(chosen)

"""Trains the previous-token head (`paradraft.drafters.parts.previous_token`), and weights rows by the probability of
the tokens before them.

The tokens between a row's anchor and the row are those of the text, as if they had been drafted.

Shape letters: S groups of samples, N tokens of the longest, R rows, m some of them, D width of the model, X the head's
rank, E width of the teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.drafters.parts.previous_token import PreviousTokenHead
from paradraft.train.objectives.batch import TrainingBatch
from paradraft.train.objectives.rows import FILLING
from paradraft.train.objectives.teacher import Teacher


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

"""Markov head: a bias for each drafted token by the token before it, as engines read it (DSpark, 2607.05147).

    logits_i += B A[x_{i-1}],

with a row A[x] for each token of the target and a matrix B of low rank. The token before the first drafted one is the
anchor, the last committed token. A begins as a random projection of the target's embeddings, so that a token that no
text has is near its like; B is zero, so that a new head changes nothing.

Shape letters: B rows of a batch, K drafted tokens, V vocabulary, U drafted ids, D hidden size, X rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paradraft.drafters.parts.draft_head import drafted_ids
from paradraft.drafters.parts.path_heads.correction import Correction, without_forbidden
from paradraft.formats.head import Head
from paradraft.formats.path_heads import MARKOV_EMBEDDING, MARKOV_OUTPUT, MARKOV_RANK
from paradraft.models.causal_lm import CausalLM
from paradraft.ragged import upload


class MarkovHead(nn.Module):
    """The matrices A and B.

    Args:
        embeddings_VD: of the target.
        ids: U.
        rank: X.
    """

    def __init__(self, embeddings_VD: Tensor, ids: int, rank: int, *, seed: int) -> None:
        super().__init__()
        self.embedding = projected(embeddings_VD, rank, seed=seed)
        self.output = nn.Linear(rank, ids, bias=False)
        nn.init.zeros_(self.output.weight)


def projected(embeddings_VD: Tensor, rank: int, *, seed: int) -> nn.Embedding:
    """A random projection of embeddings, of which the root mean square is 1."""
    projection_DX = torch.randn(embeddings_VD.shape[1], rank, generator=torch.Generator().manual_seed(seed))
    projected_VX = embeddings_VD.float().cpu() @ projection_DX
    size = projected_VX.square().mean().sqrt().clamp(min=1e-6)
    return nn.Embedding(len(embeddings_VD), rank, _weight=projected_VX / size)


class MarkovCorrection(Correction):
    """Draws tokens with the head of a checkpoint on the states of `target`; raises ValueError if it is damaged."""

    @torch.no_grad()
    def __init__(self, target: CausalLM, head: Head) -> None:
        rank, (_, rows, ids) = head.setting(MARKOV_RANK, int), drafted_ids(target, head)
        dtype = target.model.dtype
        embedded = len(target.model.get_input_embeddings().weight)
        self._embedding = head.tensor(MARKOV_EMBEDDING, embedded, rank).to(target.device, dtype)
        output_UX = head.tensor(MARKOV_OUTPUT, rows, rank).to(target.device, dtype)
        super().__init__(target, ids, without_forbidden(ids.logits(output_UX.T.clone())), self._embedding)

    def _reads(self, states_BKD: Tensor) -> None:
        return None

    def _remember(self, tokens_BW: Tensor, read_B1X: Tensor | None, before_BWX: Tensor | None) -> Tensor:
        return nn.functional.embedding(tokens_BW.clamp(min=0), self._embedding)

    def _after_anchors(self, anchors: Sequence[int], logits_BKV: Tensor) -> Tensor:
        memories_BX = nn.functional.embedding(upload(list(anchors), logits_BKV.device), self._embedding)
        self._correct(logits_BKV[:, 0], memories_BX)
        return logits_BKV

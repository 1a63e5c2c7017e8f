"""Selector: decides between the likeliest tokens of each place by the token before (DFlash 2).

With the state h_i of place i and the C likeliest tokens c of its logits,

    score_i(c) = logits_i(c) + B[c] · (A[x_{i-1}] ∘ H h_i),

with a row A[x] for each token of the target and a row B[c] for each that can be drafted; all other tokens are not
drafted, as in engines. The token before the first drafted one is the anchor, the last committed token. Beside the
output head's V numbers a decision reads C rows only, so its cost does not grow with the vocabulary. A begins as a
random projection of the target's embeddings; B is zero, so that a new head changes no score.

Shape letters: B rows of a batch, K drafted tokens, W nodes of a depth, C likeliest tokens, V vocabulary, U drafted ids,
D hidden size, X rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from paradraft.drafters.parts.draft_head import drafted_ids
from paradraft.drafters.parts.path_heads.correction import without_forbidden
from paradraft.drafters.parts.path_heads.head import PathHead
from paradraft.drafters.parts.path_heads.markov import projected
from paradraft.formats.head import Head
from paradraft.formats.path_heads import SELECTED, SELECTOR_EMBEDDING, SELECTOR_OUTPUT, SELECTOR_RANK, SELECTOR_STATE
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.selector import NativeSelector
from paradraft.ragged import upload
from paradraft.sampling.expansion import Expand


class SelectorHead(nn.Module):
    """The matrices A, B and H.

    Args:
        embeddings_VD: of the target.
        ids: U.
        rank: X.
        states: root mean square of the states' elements, for the initial weights.
    """

    def __init__(self, embeddings_VD: Tensor, ids: int, rank: int, *, states: float, seed: int) -> None:
        super().__init__()
        width = embeddings_VD.shape[1]
        self.embedding = projected(embeddings_VD, rank, seed=seed)
        self.output = nn.Linear(rank, ids, bias=False)
        nn.init.zeros_(self.output.weight)
        self.state = nn.Linear(width, rank, bias=False)
        generator = torch.Generator().manual_seed(seed + 1)
        nn.init.normal_(self.state.weight, std=1 / (math.sqrt(width) * states), generator=generator)

    def read(self, tokens: Tensor, states: Tensor) -> Tensor:
        """`[…, X]` A[x] ∘ H h of tokens `[…]` and states `[…, D]`."""
        both: Tensor = self.embedding(tokens).to(states.dtype) * self.state(states)
        return both

    def corrections(self, read_mX: Tensor, ids_mC: Tensor) -> Tensor:
        """`[m, C]` what is added to the logits of ids."""
        return torch.einsum("mcx,mx->mc", embedding(ids_mC, self.output.weight).to(read_mX.dtype), read_mX)


class Selector(PathHead):
    """Draws tokens with the head of a checkpoint on the states of `target`; raises ValueError if it is damaged."""

    @torch.no_grad()
    def __init__(self, target: CausalLM, head: Head) -> None:
        rank, (_, rows, ids) = head.setting(SELECTOR_RANK, int), drafted_ids(target, head)
        width = target.model.config.hidden_size
        embedded = len(target.model.get_input_embeddings().weight)
        self._embedding_VX, output_UX, state_XD = (
            head.tensor(name, *shape).to(target.device, target.model.dtype)
            for name, shape in (
                (SELECTOR_EMBEDDING, (embedded, rank)),
                (SELECTOR_OUTPUT, (rows, rank)),
                (SELECTOR_STATE, (rank, width)),
            )
        )
        self._state = target.linear(state_XD)
        self._output_VX = without_forbidden(ids.logits(output_UX.T.clone())).contiguous()
        native = NativeSelector(self._embedding_VX, self._output_VX, SELECTED) if target.is_native else None
        super().__init__(target, native)

    def _reads(self, states_BKD: Tensor) -> Tensor:
        read_BKX: Tensor = self._state(states_BKD)
        return read_BKX

    def _first_and_later(
        self, anchors: Sequence[int], logits_BKV: Tensor, reads: Tensor | None
    ) -> tuple[Tensor, Expand]:
        assert reads is not None
        logits_BKC, ids_BKC = logits_BKV.topk(min(SELECTED, logits_BKV.shape[2]), dim=-1)
        gated_BKCX = reads[:, :, None] * embedding(ids_BKC, self._output_VX)
        rows_BKXC = gated_BKCX.transpose(2, 3).to(logits_BKV.dtype)

        def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
            before_BWX = embedding(new_BW.clamp(min=0), self._embedding_VX).to(logits_BKV.dtype)
            scores_BWC = logits_BKC[:, depth, None] + before_BWX @ rows_BKXC[:, depth]
            all_BWV = logits_BKV.new_full((*new_BW.shape, logits_BKV.shape[2]), -torch.inf)
            return all_BWV.scatter_(2, ids_BKC[:, depth, None].expand_as(scores_BWC), scores_BWC)

        anchors_B1 = upload([[anchor] for anchor in anchors], logits_BKV.device)
        return expand(0, anchors_B1, anchors_B1), expand

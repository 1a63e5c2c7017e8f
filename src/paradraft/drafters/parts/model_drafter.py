"""Base of drafters that draw from a model's logits, and drafting token by token.

Shape letters: B rows of a batch, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.drafters.parts.last_states import LastStates
from paradraft.drafters.parts.pending_states import PendingStates
from paradraft.drafters.parts.pending_tokens import PendingTokens
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.tree import grow
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates, assemble, candidates_needed, joined
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, Tree


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a drafter with a checkpoint and nothing else to choose.

    Args:
        draft: Hugging Face id or folder of the checkpoint; "pocket" is the shipped one.
    """

    draft: str


class ModelDrafter(Drafter):
    """Draws its drafts with a `Sampler`, which follows the rows together with their states.

    Subclasses override `propose`.

    Args:
        lm: the model of the drafts' logits.
        states: what the drafter keeps of each row, beside the sampler.
    """

    _sampler: Sampler
    _tree: Tree | None = None

    def __init__(self, lm: CausalLM, states: PendingTokens | LastStates | PendingStates) -> None:
        self.lm, self._states = lm, states

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._sampler, self._tree = Sampler(drafting=drafting, device=device, faster=self.lm.sampling), drafting.tree
        self._states.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Stores the prompts; a draft model's prefill happens at the first draft."""
        self._sampler.join(requests)
        self._states.join(requests, prompt)

    def catch_up(self, rows: Sequence[int], most: int) -> dict[int, int]:
        """See `Drafter`."""
        return self._states.catch_up(rows, most)

    def commit(self, new: Committed) -> None:
        """See `Drafter`."""
        self._states.commit(new)
        self._sampler.commit(new)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._states.keep(rows)
        self._sampler.keep(rows)

    def save(self, row: int, most: int) -> Any:
        """See `Drafter`."""
        return self._states.save(row, most)

    def restore(self, row: int, saved: Any, shared: int) -> None:
        """See `Drafter`."""
        self._states.restore(row, saved, shared)


def draft_one_by_one(
    lm: CausalLM, sampler: Sampler, tree: Tree | None, unread: list[list[int]], lengths: Sequence[int]
) -> tuple[Draft, Tensor]:
    """Drafts by K passes, of which the first reads `unread`; a tree's side branches are the next best tokens.

    The cache then has all tokens that were read.

    Args:
        unread: tokens of each row, fewer than the model's width; none where `lengths` is 0.
        lengths: tokens to draft in each row; K is their maximum, at least 1.

    Returns:
        The draft; and `[B, K]` the tokens along its best path, `ABSENT` beyond a row's length.
    """
    device = lm.device
    reading, read_counts = ragged.from_lists(unread, device), list(map(len, unread))
    last_B1 = upload([[max(count - 1, 0)] for count in read_counts], device)
    lengths_B1 = upload(lengths, device)[:, None]
    best_BK = torch.empty(len(lengths), 0, dtype=torch.long, device=device)
    candidates: list[Candidates] = []
    for depth in range(max(lengths)):
        logits_B1V = lm.forward(reading, logit_rows=last_B1).logits
        lm.cache.advance(read_counts)
        if not candidates:
            last_B1 = torch.zeros_like(last_B1)
        candidates.append(sampler.candidates(logits_B1V, depth, candidates_needed(tree), best_BK))
        best_B1 = candidates[-1].tokens[:, :, 0].masked_fill(lengths_B1 <= depth, ABSENT)
        best_BK = torch.cat([best_BK, best_B1], dim=1)
        reading = best_B1.masked_fill(lengths_B1 <= depth + 1, ABSENT)
        read_counts = [int(length > depth + 1) for length in lengths]
    return assemble(joined(candidates), tree, aside=0.0, faster=grow), best_BK

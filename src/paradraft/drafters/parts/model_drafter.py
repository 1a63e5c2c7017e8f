"""Base of drafters that draw from a model's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradraft.core import Committed, Drafter, Drafting, Request
from paradraft.drafters.parts.draft_layers import DraftLayers
from paradraft.drafters.parts.last_states import LastStates
from paradraft.drafters.parts.pending_tokens import PendingTokens
from paradraft.models.causal_lm import CausalLM
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree


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

    def __init__(self, lm: CausalLM, states: PendingTokens | LastStates | DraftLayers) -> None:
        self.lm, self._states = lm, states

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._sampler, self._tree = Sampler(drafting=drafting, device=device, faster=self.lm.draw), drafting.tree
        self._states.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Stores the prompts; a draft model's prefill happens at the first draft."""
        self._sampler.join(requests)
        self._states.join(requests, prompt)

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

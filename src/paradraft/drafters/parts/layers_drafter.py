"""Base of drafters with draft layers: EAGLE and ParallelSpec.

Shape letters: B rows of a batch, K drafted tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.drafters.parts.draft_layers import DraftLayers, SavedLayers
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.drafters.parts.previous_token import Correction, previous_token_head
from paradraft.formats.head import Head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.tree import grow
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates, assemble, candidates_needed, joined
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, Tree


class LayersDrafter(Drafter):
    """Keeps all state in its `DraftLayers`; subclasses override `propose`."""

    _sampler: Sampler

    def __init__(self, layers: DraftLayers) -> None:
        self.layers = layers
        self.hidden_layers = self.prompt_hidden_layers = layers.layers
        self._correction: Correction | None = None
        self._tree: Tree | None = None

    @property
    def models(self) -> tuple[CausalLM, ...]:
        """The draft layers."""
        return (self.layers.lm,)

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._sampler, self._tree = Sampler(drafting=drafting, device=device, faster=self.layers.lm.draw), drafting.tree
        self.layers.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Stores the prompts; the prefill happens at the first draft."""
        self._sampler.join(requests)
        self.layers.join(requests, prompt)

    def commit(self, new: Committed) -> None:
        """Adds the committed tokens and the target's states to the pending ones."""
        self.layers.commit(new)
        self._sampler.commit(new)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self.layers.keep(rows)
        self._sampler.keep(rows)

    def save(self, row: int, most: int) -> SavedLayers:
        """The row of the KV cache, and its pending states."""
        return self.layers.save(row, most)

    def restore(self, row: int, saved: SavedLayers, shared: int) -> None:
        """Reuses the common prefix of the saved row."""
        self.layers.restore(row, saved, shared)

    def one_by_one(self, lengths: Sequence[int]) -> Draft:
        """Drafts with one pass per token, each on the state that the previous one returned."""
        layers, device, k = self.layers, self.layers.target.device, max(lengths)
        if k == 0:
            return Draft.empty(len(lengths), device)
        lengths_B1 = upload(lengths, device)[:, None]
        states_B1D, committed = layers.read(lengths), layers.lm.lengths
        best_BK = torch.empty(len(lengths), 0, dtype=torch.long, device=device)
        candidates: list[Candidates] = []
        for depth in range(k):
            if candidates:
                wanted_B1 = best_BK[:, -1:].masked_fill(lengths_B1 <= depth, ABSENT)
                states_B1D = layers.step(wanted_B1, states_B1D)
            logits_B1V = layers.target.head(states_B1D)
            candidates.append(self._sampler.candidates(logits_B1V, depth, candidates_needed(self._tree), best_BK))
            best_BK = torch.cat([best_BK, candidates[-1].tokens[:, :, 0]], dim=1)
        layers.lm.rollback(committed)
        return assemble(joined(candidates), self._tree, aside=0.0, faster=grow)

    def correct_with(self, head: Head) -> None:
        """Enables the previous-token head if the checkpoint has one."""
        if "previous_token_rank" in head.config:
            self._correction = Correction(self.layers.target, previous_token_head(head))

    def in_one_pass(self, lengths: Sequence[int], masks: Callable[[Tensor, int], Tensor]) -> Draft:
        """Drafts with one pass over the pending tokens and masks; see `DraftLayers.read`."""
        if max(lengths) == 0:
            return Draft.empty(len(lengths), self.layers.target.device)
        states_BKD = self.layers.read(lengths, masks)
        logits_BKV = self.layers.target.head(states_BKD)
        return draft_of_pass(self._sampler, self._tree, logits_BKV, self._correction, states_BKD)

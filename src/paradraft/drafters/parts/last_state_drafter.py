"""Base of drafters that read only the target's last hidden state: Medusa and Hydra.

Shape letters: B rows of a batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paradraft.core import Committed, Drafter, Drafting, Request
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.sampling.sampler import Sampler
from paradraft.tree import Tree


class LastStateDrafter(Drafter):
    """Keeps the last committed token of each row, and the state from which the target predicted it.

    Subclasses override `propose`.
    """

    hidden_layers = (FINAL_NORM,)
    prompt_hidden_layers = (FINAL_NORM,)
    _sampler: Sampler

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self._tree: Tree | None = None

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._sampler, self._tree = Sampler(drafting=drafting, device=device, faster=self.lm.draw), drafting.tree
        self._states_BD = torch.empty(0, self.lm.model.config.hidden_size, device=device)
        self._last_B = torch.empty(0, dtype=torch.long, device=device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Keeps the last token of each prompt, and the state before it."""
        self._sampler.join(requests)
        states_bD = prompt.last_hidden(FINAL_NORM)
        self._states_BD = torch.cat([self._states_BD.to(states_bD.dtype), states_bD])
        self._last_B = torch.cat([self._last_B, prompt.last_tokens()])

    def commit(self, new: Committed) -> None:
        """Keeps the last committed token, and the state before it."""
        self._states_BD, self._last_B = new.last_hidden(FINAL_NORM), new.last_tokens()
        self._sampler.commit(new)

    def keep(self, rows: torch.Tensor) -> None:
        """See `Drafter`."""
        self._states_BD, self._last_B = self._states_BD[rows], self._last_B[rows]
        self._sampler.keep(rows)

"""The target's last hidden state of each row, which Medusa and Hydra read.

Shape letters: B rows of a batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.core import Committed, Request
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.ragged import upload


class LastStates:
    """The last committed token of each row, and the state from which the target predicted it."""

    def __init__(self, lm: CausalLM) -> None:
        self._lm = lm

    def start(self) -> None:
        """Drops all rows."""
        self.states_BD = torch.empty(0, self._lm.model.config.hidden_size, device=self._lm.device)
        self.tokens_B = torch.empty(0, dtype=torch.long, device=self._lm.device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds the last token of each prompt, and the state before it."""
        states_bD = prompt.last_hidden(FINAL_NORM)
        self.states_BD = torch.cat([self.states_BD.to(states_bD.dtype), states_bD])
        self.tokens_B = torch.cat([self.tokens_B, self._last_tokens(prompt)])

    def commit(self, new: Committed) -> None:
        """Keeps the last committed token, and the state before it."""
        self.states_BD, self.tokens_B = new.last_hidden(FINAL_NORM), self._last_tokens(new)

    def _last_tokens(self, new: Committed) -> Tensor:
        return upload([tokens[-1] for tokens in new.tokens], self._lm.device)

    def catch_up(self, rows: Sequence[int], most: int) -> dict[int, int]:
        """Nothing to read."""
        return {}

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self.states_BD, self.tokens_B = self.states_BD[rows], self.tokens_B[rows]

    def save(self, row: int, most: int) -> None:
        """Nothing: a prompt's last state is computed again."""

    def restore(self, row: int, saved: None, shared: int) -> None:
        """Nothing to restore."""

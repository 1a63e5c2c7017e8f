"""No drafter: every round is plain decoding (AR+)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Config:
    """No settings."""


class NoDrafter(Drafter):
    """Proposes nothing.

    Args:
        reserved_tokens: those of another drafter, with which this is compared.
    """

    def __init__(self, reserved_tokens: tuple[int, ...] = ()) -> None:
        self.reserved_tokens = reserved_tokens
        self._rows = 0

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._device, self._rows = device, 0

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Counts the rows."""
        self._rows += len(requests)

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """An empty draft."""
        return Draft.empty(self._rows, self._device)

    def keep(self, rows: Tensor) -> None:
        """Counts the rows."""
        self._rows = len(rows)


def build(config: Config, target: Target, runtime: Runtime) -> NoDrafter:
    """The drafter that proposes nothing."""
    return NoDrafter()

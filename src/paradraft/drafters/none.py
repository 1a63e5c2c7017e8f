"""No drafter: every round is plain decoding (AR+)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paradraft.core import Draft, Drafter, Drafting
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Config:
    """No settings."""


class NoDrafter(Drafter):
    """Proposes nothing; `reserved_tokens` are those of a drafter that it is compared with."""

    def __init__(self, reserved_tokens: tuple[int, ...] = ()) -> None:
        self.reserved_tokens = reserved_tokens

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._device = device

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """An empty draft."""
        return Draft.empty(len(lengths), self._device)


def build(config: Config, target: Target, runtime: Runtime) -> NoDrafter:
    """Builds the drafter."""
    return NoDrafter()

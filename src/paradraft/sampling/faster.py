"""What a sampler may do faster than torch.

Shape letters: B rows of a batch, R positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paradraft.sampling_params import Sampling


class Faster(Protocol):
    """What a sampler does with logits `[B, R, V]` after bias, penalties and processors, and the settings of the rows.

    Each returns None for inputs that it does not support.
    """

    def draw(self, logits_BRV: Tensor, samplings: Sequence[Sampling], positions_BR: Tensor) -> Tensor | None:
        """See `Sampler.draw`; `[B, R]` positions in the texts."""

    def confidence(self, logits_BRV: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
        """See `Candidates.confidence`."""

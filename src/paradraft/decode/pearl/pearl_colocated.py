"""PEARL on the devices of a pipeline-parallel target (Liu et al. 2024, Appendix G).

A target whose layers are split over several devices computes on one of them at a time. While it is on the first one,
the drafter drafts the first half of its window on the last one, and then the second half on the first one.

The paper moves the drafter's KV cache from the last device to the first. Here only the drafted ids are moved: each copy
of the draft model reads the other's tokens in the pass of its own first token, and a pass over a few tokens takes as
long as over one, because both read all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.ragged import from_lists, to_lists
from paradraft.traits import Traits


class CoLocatedDrafter(Drafter):
    """Two copies of a drafter, on the target's last and first device; the second continues the draft of the first."""

    traits = Traits(can_run_ahead=True)

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.copies = (first, second)
        """In the order in which they draft."""
        self.reserved_tokens, self.max_k = first.reserved_tokens, first.max_k
        self.models = first.models + second.models

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._device = device
        for copy in self.copies:
            copy.start(drafting, device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """See `Drafter`."""
        for copy in self.copies:
            copy.join(requests, prompt)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """See `Drafter`; the first copy drafts ceil(γ / 2) of γ tokens."""
        first, second = self.copies
        before = [[] for _ in lengths] if after is None else to_lists(after.tokens)
        first_half = to_lists(first.propose([length - length // 2 for length in lengths], after).tokens)
        known = Draft.chain(from_lists(ragged.joined(before, first_half), self._device))
        second_half = to_lists(second.propose([length // 2 for length in lengths], known).tokens)
        return Draft.chain(from_lists(ragged.joined(first_half, second_half), self._device))

    def commit(self, new: Committed) -> None:
        """See `Drafter`."""
        for copy in self.copies:
            copy.commit(new)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        for copy in self.copies:
            copy.keep(rows)

    def save(self, row: int, most: int) -> Any:
        """See `Drafter`."""
        return [copy.save(row, most) for copy in self.copies]

    def restore(self, row: int, saved: Any, shared: int) -> None:
        """See `Drafter`."""
        for copy, part in zip(self.copies, saved, strict=True):
            copy.restore(row, part, shared)

    def close(self) -> None:
        """See `Drafter`."""
        for copy in self.copies:
            copy.close()

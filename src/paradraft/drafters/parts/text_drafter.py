"""Base of drafters that need only the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.core import Committed, Drafter, Drafting, Request


class TextDrafter(Drafter):
    """A drafter that needs only the committed tokens."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self.device = device
        self.texts: list[list[int]] = []
        """The committed tokens of each row."""

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Stores the prompts."""
        self.texts += [list(request.tokens) for request in requests]

    def commit(self, new: Committed) -> None:
        """Appends committed tokens."""
        for text, tokens in zip(self.texts, new.tokens, strict=True):
            text += tokens

    def keep(self, rows: Tensor) -> None:
        """Drops the other rows."""
        self.texts = [self.texts[row] for row in rows.tolist()]

"""What a pass read: enough to count its bytes and operations afterwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a causal LM over a batch.

    Args:
        rows: texts of the batch.
        tokens: new tokens of each.
        logits: tokens of each whose logits are wanted; 0 while a prompt is read.
        context: tokens that the longest row had before.
    """

    rows: int
    tokens: int
    logits: int
    context: int

"""A mistake that both rules must be tested for: a bonus token after a rejection."""

from __future__ import annotations

from paradraft.core import TargetOut, Verdict


def with_bonus(verdict: Verdict, out: TargetOut) -> Verdict:
    """After the recovered token one more, from the logits after the rejected node."""
    tokens = [list(row) for row in verdict.tokens]
    for logits_MV, path, row in zip(out.logits, verdict.paths, tokens, strict=True):
        if len(path) + 1 < len(logits_MV):
            row.append(int(logits_MV[len(path) + 1].argmax()))
    return Verdict(paths=verdict.paths, tokens=tokens)

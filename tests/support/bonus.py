"""A mistake that both rules must be tested for: a bonus token after a rejection."""

from __future__ import annotations

from paradraft.core import TargetOut, Verdict


def with_bonus(verdict: Verdict, out: TargetOut) -> Verdict:
    """After the recovered token one more, from the logits after the rejected node."""
    tokens = verdict.tokens.clone()
    for row, accepted in enumerate(verdict.accepted.tolist()):
        if accepted < verdict.path.shape[1]:
            tokens[row, accepted + 1] = out.logits[row, accepted + 1].argmax()
    return Verdict(path=verdict.path, accepted=verdict.accepted, tokens=tokens)

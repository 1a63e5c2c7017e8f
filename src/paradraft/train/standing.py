"""How a run stands: which of its drafters is the best so far, and for how long it has been."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What a drafter is worth: the larger acceptance length wins, and of equal lengths the smaller loss.

    Args:
        step: steps that were done when it was measured.
        acceptance_length: tokens per target pass; None without a target.
        held_out_loss: mean loss on held-out samples.

    Example:
        >>> first = Worth(step=1, acceptance_length=2.5, held_out_loss=1.0)
        >>> first < Worth(step=2, acceptance_length=3.0, held_out_loss=4.0)
        True
        >>> first < Worth(step=2, acceptance_length=2.5, held_out_loss=0.9)
        True
    """

    step: int
    acceptance_length: float | None
    held_out_loss: float

    def __lt__(self, other: Worth) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[float, float]:
        return self.acceptance_length or 0.0, -self.held_out_loss


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The best drafter of a run so far.

    Args:
        best: what it is worth; None before the first evaluation.
        stale: evaluations since then, none of them better.
    """

    best: Worth | None = None
    stale: int = 0

    def after(self, worth: Worth) -> Standing:
        """How the run stands after one more evaluation."""
        if self.best is None or self.best < worth:
            return Standing(best=worth)
        return replace(self, stale=self.stale + 1)

    def is_over(self, patience: int | None) -> bool:
        """Whether a run with this patience stops here."""
        return patience is not None and self.stale >= patience

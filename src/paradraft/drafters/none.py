"""No drafter: every round is plain decoding (AR+)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradraft.core import Draft, Prompt, TargetOut, Verdict
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Config:
    """No settings."""


class NoDrafter:
    """Proposes nothing."""

    needs_hidden: tuple[int, ...] = ()
    can_run_ahead = False
    can_branch = False
    can_branch_aside = False

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        """See `Drafter`."""
        self._nothing = Draft.empty(len(prompt.tokens), prompt.tokens.device)

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """An empty draft."""
        return self._nothing

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        """Nothing to bring back."""

    def keep_rows(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._nothing = Draft.empty(len(rows), self._nothing.tokens.device)


def build(config: Config, target: Target, runtime: Runtime) -> NoDrafter:
    """The drafter that proposes nothing."""
    return NoDrafter()

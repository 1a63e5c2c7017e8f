"""Verification functions by rule name."""

from __future__ import annotations

from collections.abc import Callable

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.sampling.sampler import Sampler
from paradraft.verify import match, rejection, typical

Verify = Callable[[Draft, TargetOut, Sampler], Verdict]
RULES: dict[str, Verify] = {"match": match.verify, "rejection": rejection.verify, "typical": typical.Typical()}

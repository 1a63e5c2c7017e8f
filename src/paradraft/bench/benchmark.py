"""What a benchmark compares: methods on one target under the same conditions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paradraft.bench.methods import Method
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.core import Sampling
from paradraft.models.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Methods, and what is the same for all of them.

    Args:
        target: whose answers are timed; a shape is, too.
        methods: ways to decode.
        sampling: how tokens are chosen.
        runtime: the device, and all else but the dtype, which is the method's own.
        runs: how often everything is repeated.
        acceptance: replaces the verdicts of all methods that draft; then no answer ends before its last token.
        profiled: profile some rounds of each method of ours, after all have been timed.
        vllm_python: the Python of vLLM's environment, for methods that run there; None for the usual place.
    """

    target: str
    methods: list[Method]
    sampling: Sampling
    runtime: Runtime
    runs: int
    acceptance: SyntheticAcceptance | None = None
    profiled: bool = False
    vllm_python: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a report."""
        return {
            "target": self.target,
            "methods": [method.spec for method in self.methods],
            "runs": self.runs,
            "sampling": asdict(self.sampling),
            "runtime": asdict(self.runtime),
            "synthetic_acceptance": None if self.acceptance is None else self.acceptance.rates,
        }

"""Estimates the duration of a run from its first steps, and lists results of recorded runs."""

from __future__ import annotations

from dataclasses import dataclass

from paradraft.train.run.evaluation_time import SHARE
from paradraft.wording import number_of

UNMEASURED = 1
"""Warm-up steps that are not measured."""
MEASURED = 2
"""Steps that are measured; several, because each step drops other rows."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Result of a recorded run.

    Args:
        is_real: whether these models are for use, and not only for tests.
        points: pairs of rows trained on, and acceptance length on held-out prompts.
    """

    drafter: str
    family: str
    is_real: bool
    points: tuple[tuple[int, float], ...]
    file: str

    @property
    def in_words(self) -> str:
        """The curve in one line."""
        (_, before), *later = self.points
        yields = ", ".join(f"{length:.2f} after {rows:,} rows" for rows, length in later)
        return f"{self.family}: {before:.2f} tokens per target pass before, {yields} ({self.file})"


CURVES = (
    Curve(
        drafter="pard",
        family="pocket family (11 M target, 4 M draft, K = 8)",
        is_real=False,
        points=((0, 1.98), (138_789, 2.23), (277_710, 2.39)),
        file="benchmarks/readme-training_epyc-avx512-2cores_2026-11-24.jsonl",
    ),
    Curve(
        drafter="pard",
        family="Qwen2.5-Coder 1.5B Q4_K_M (the 0.5B with 24,000 ids as draft, LoRA, 808 answers, K = 6)",
        is_real=True,
        points=((0, 1.82), (234_000, 2.66), (467_000, 3.09)),
        file="benchmarks/training-qwen2.5-coder-1.5b-pard_epyc-avx512-2cores_2026-11-27.jsonl",
    ),
    Curve(
        drafter="pard",
        family="SmolLM2 135M Q4_1 (a cut of 8 of its 30 layers, 6,842 answers, K = 4)",
        is_real=True,
        points=((0, 1.00), (208_000, 1.13)),
        file="benchmarks/training-smollm2-pard-cut_epyc-avx512-2cores_2026-11-28.jsonl",
    ),
    Curve(
        drafter="pard",
        family="Qwen2.5-Coder 0.5B Q4_K_M (a cut of 6 of its 24 layers, 12,288 ids, 6,842 answers, K = 4)",
        is_real=True,
        points=((0, 1.00), (139_000, 1.09)),
        file="benchmarks/training-qwen2.5-coder-0.5b-pard-cut_epyc-avx512-2cores_2026-11-28.jsonl",
    ),
    Curve(
        drafter="ppd",
        family="SmolLM2 135M Q4_1 (6,842 answers, 3 prompt tokens, passes of 24 nodes)",
        is_real=True,
        points=((0, 1.41), (175_000, 1.58)),
        file="benchmarks/training-smollm2-ppd_epyc-avx512-2cores_2026-11-28.jsonl",
    ),
    Curve(
        drafter="eagle_parallel",
        family="SmolLM2 135M Q4_1 (6,794 answers, K = 6, 12,288 ids)",
        is_real=True,
        points=((0, 1.03), (6_600_000, 1.63), (21_200_000, 2.05), (30_300_000, 2.19)),
        file="benchmarks/training-smollm2-eagle_parallel_h200_2026-11-27.jsonl",
    ),
    Curve(
        drafter="eagle_parallel",
        family="Qwen2.5-Coder 0.5B Q4_K_M (6,842 answers, K = 4, 12,288 ids)",
        is_real=True,
        points=((0, 1.01), (370_000, 1.32)),
        file="benchmarks/training-qwen2.5-coder-0.5b-eagle_parallel_epyc-avx512-2cores_2026-11-28.jsonl",
    ),
    Curve(
        drafter="dflash",
        family="SmolLM2 135M Q4_1 (6,858 answers, K = 6, 8,192 ids, as in the template)",
        is_real=True,
        points=((0, 1.03), (628_000, 1.48), (1_256_000, 1.66)),
        file="benchmarks/training-smollm2-dflash-valid-prefix_xeon-avx512-1core_2026-11-30.jsonl",
    ),
    Curve(
        drafter="dflash",
        family="SmolLM2 135M Q4_1 (the same without weighting)",
        is_real=True,
        points=((0, 1.03), (980_000, 1.33), (1_960_000, 1.57), (2_940_000, 1.65), (4_900_000, 1.85)),
        file="benchmarks/training-smollm2-dflash_epyc-avx512-1core_2026-11-29.jsonl",
    ),
)
"""Recorded runs, one per drafter and family."""


def curves_in_words(drafter: str) -> list[str]:
    """Describes the recorded runs of a drafter, given as name or spec, and notes if none has a real model."""
    name = drafter.partition(":")[0]
    curves = [curve for curve in CURVES if curve.drafter == name]
    lines = [f"recorded before, {curve.in_words}" for curve in curves]
    if not any(curve.is_real for curve in curves):
        lines.append(f"no {name} drafter for a real model is recorded yet, so what this one yields is open")
    return lines


class FirstSteps:
    """Measures the first steps of a process, and reports the expected duration once.

    Args:
        evaluation_s: duration of one, if measured.
        is_limited: whether evaluations are left out that would take more than `SHARE` of the time.

    Example:
        >>> first = FirstSteps(steps=600, evaluations=10, evaluation_s=60.0)
        >>> first.add(900, taken_s=30.0), first.add(1000, taken_s=1.5), first.add(1200, taken_s=2.5)
        (None, None, 'expected: 660,000 rows in 600 steps, 30 minutes (550 rows/s in 2 steps; 10 evaluations of 60 s)')
        >>> first.add(1000, taken_s=2.0)
    """

    def __init__(self, *, steps: int, evaluations: int, evaluation_s: float | None, is_limited: bool = False) -> None:
        self._steps, self._evaluations, self._evaluation_s = steps, evaluations, evaluation_s
        self._is_limited = is_limited
        self._done, self._rows, self._taken_s = 0, 0, 0.0

    def add(self, rows: int, *, taken_s: float) -> str | None:
        """Records a step; returns the estimate after the last measured step, None after all others.

        Args:
            rows: of the step, on all devices together.
        """
        self._done += 1
        if UNMEASURED < self._done <= UNMEASURED + MEASURED:
            self._rows += rows
            self._taken_s += taken_s
        return self._in_words if self._done == UNMEASURED + MEASURED else None

    @property
    def _in_words(self) -> str:
        step_s = self._taken_s / MEASURED
        whole_s = self._steps * step_s
        details = [f"{self._rows / MEASURED / step_s:.0f} rows/s in {MEASURED} steps"]
        if self._evaluations:
            if self._evaluation_s is None:
                details.append(f"{self._evaluations} evaluations come on top")
            else:
                evaluations = self._evaluations
                if self._is_limited:
                    paid = int(SHARE / (1 - SHARE) * whole_s / max(self._evaluation_s, 1e-9))
                    evaluations = min(evaluations, max(paid, 1))
                whole_s += evaluations * self._evaluation_s
                details.append(f"{number_of(evaluations, 'evaluation')} of {self._evaluation_s:.0f} s")
        rows_of_all = round(self._rows / MEASURED * self._steps)
        return f"expected: {rows_of_all:,} rows in {self._steps:,} steps, {_duration(whole_s)} ({'; '.join(details)})"


def _duration(seconds: float) -> str:
    """
    >>> [_duration(seconds) for seconds in (40, 300, 95 * 60, 3 * 86400)]
    ['40 s', '5 minutes', '95 minutes', '72.0 hours']
    """
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"

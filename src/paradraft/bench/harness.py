"""Runs several methods on the same prompts, interleaved, and sums up times and peak memory.

Every method answers as many prompts as the largest batch has before any method continues with the next ones, and the
order rotates, so that a slow moment of the machine affects all of them alike. Times include prefill and the first
draft. Before the clock starts every method has answered the longest and the shortest prompt once, and a batch method a
whole batch (compilation).

Peak memory is that of the process, with every model that is loaded: compare two methods of one run. Linux keeps the
peak of resident memory and resets it on demand in less than 0.1 ms. Where that fails, the resident memory at the end is
reported instead.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from paradraft.bench.baselines import PEERS
from paradraft.bench.latency import latencies
from paradraft.bench.result import Answerer, BatchResult, PeerCounts, by_round, first_length
from paradraft.bench.result_file import KEYS, speedups
from paradraft.bench.spec import AR, SETTINGS, Method
from paradraft.decode.payoff import Payoff, advice
from paradraft.decode.stats import Stats
from paradraft.models.runtime import QUANTIZED
from paradraft.sampling_params import Sampling
from paradraft.verify import rule_class

_FORGETS = Path("/proc/self/clear_refs")
_KNOWS = Path("/proc/self/status")


class PeakMemory:
    """Peak memory from here on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_reset = _reset_peak()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def rss_bytes(self) -> int:
        """Peak resident memory."""
        peak = _peak_bytes() if self._is_reset else None
        return int(psutil.Process().memory_info().rss) if peak is None else peak

    @property
    def gpu_bytes(self) -> int:
        """Peak GPU memory of tensors; 0 if the models are on no GPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


def _reset_peak() -> bool:
    """Resets the kernel's peak of resident memory, and returns whether that worked."""
    try:
        _FORGETS.write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes() -> int | None:
    lines = _KNOWS.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one method.

    Args:
        runs: for each run, the answers to all prompts, batch by batch.
        peak_rss_bytes: most resident memory of the process while the method answered, with the models
            of all methods loaded; for a peer in another process, that process's since its start.
        peak_gpu_bytes: the same of the GPU's memory, if it ran on one.
        warm_up_s: time of its first answers; the first of several methods that share a model compiles it.
    """

    method: Method
    runs: list[list[BatchResult]]
    peak_rss_bytes: int
    peak_gpu_bytes: int | None = None
    warm_up_s: float = 0.0

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of all answers, run by run."""
        return [tokens for run in self.runs for answer in run for tokens in answer.tokens]

    @property
    def tokens_per_s(self) -> list[float]:
        """For each run, emitted tokens per second."""
        return [sum(len(tokens) for a in run for tokens in a.tokens) / sum(a.total_s for a in run) for run in self.runs]


def measure(
    answerers: dict[Method, Answerer],
    prompts: list[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    runs: int,
    device: torch.device,
    report: Callable[[str], None],
) -> list[Measured]:
    """Times all methods on all prompts; `check_batches` must have passed."""
    if runs < 1:
        raise ValueError(f"runs={runs}: use at least 1")
    methods = list(answerers)
    most = math.lcm(*(method.batch for method in methods))
    warm_up_s: dict[Method, float] = {}
    for index, method in enumerate(methods, start=1):
        report(f"warming up {method.spec} ({index}/{len(methods)})")
        began_s = time.perf_counter()
        for batch in (prompts[: method.batch], [max(prompts, key=len)], [min(prompts, key=len)]):
            answerers[method]((batch * method.batch)[: method.batch], max_new_tokens, sampling)
        warm_up_s[method] = time.perf_counter() - began_s
    answers: dict[Method, list[list[BatchResult]]] = {method: [[] for _ in range(runs)] for method in methods}
    peaks, gpu_peaks = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    for run in range(runs):
        for first in range(0, len(prompts), most):
            report(f"run {run + 1}/{runs}, prompt {first + 1}/{len(prompts)}")
            turn = (run + first // most) % len(methods)
            for method in methods[turn:] + methods[:turn]:
                for start in range(first, min(first + most, len(prompts)), method.batch):
                    batch = prompts[start : min(start + method.batch, first + most)]
                    peak = PeakMemory(device)
                    answer = answerers[method](batch, max_new_tokens, sampling)
                    answers[method][run].append(answer)
                    peaks[method] = max(peaks[method], answer.peak_rss_bytes or peak.rss_bytes)
                    gpu_peaks[method] = max(gpu_peaks[method], peak.gpu_bytes)
    return [
        Measured(
            method=m, runs=answers[m], peak_rss_bytes=peaks[m], peak_gpu_bytes=gpu_peaks[m] or None,
            warm_up_s=warm_up_s[m],
        )
        for m in methods
    ]  # fmt: skip


def check_batches(methods: list[Method], num_prompts: int) -> None:
    """Raises ValueError unless every method can answer this many prompts in whole batches."""
    most = math.lcm(*(method.batch for method in methods))
    if num_prompts % most:
        raise ValueError(f"{num_prompts} prompts cannot be dealt out in batches of {most}: use a multiple of it")


def summarize(measured: list[Measured], sampling: Sampling) -> dict[str, dict[str, Any]]:
    """The figures of each method, by its spec.

    For speedups see `result_file.py`. `identical_to_ar` compares with the `ar` of the same dtype if there is
    one, else with the fastest of the same batch size, or of any; rounded weights are another target, and count only
    where there are no others. It is None where other random numbers were drawn (peers, and the rejection rule), and
    where no `ar` ran. `advice` is a sentence for methods that do not pay. Settings that a method does not have are
    None.
    """
    summary = dict[str, dict[str, Any]]()
    for result in measured:
        reference = _reference(result.method, measured)
        has_own_numbers = result.method.name in PEERS or rule_class(result.method.speculation.verify).draws == "numbers"
        comparable = reference is not None and (sampling.is_greedy or not has_own_numbers)
        summary[result.method.spec] = {
            "method": result.method.name,
            **dict.fromkeys(SETTINGS) | result.method.settings,
            "tokens_per_s": {"median": statistics.median(result.tokens_per_s), "runs": result.tokens_per_s},
            **dict.fromkeys(KEYS),
            **_rounds(result),
            **latencies(answer for run in result.runs for answer in run),
            "identical_to_ar": result.texts == reference.texts if comparable and reference else None,
            "differing_prompts": _differing(result, reference) if comparable and reference else None,
            "distinct_4grams": distinct_share(result.texts),
            "tokens": sum(map(len, result.texts)),
            "peak_rss_bytes": result.peak_rss_bytes,
            "peak_gpu_bytes": result.peak_gpu_bytes,
            "warm_up_s": result.warm_up_s,
        }
    for spec, ratios in speedups(summary).items():
        summary[spec] |= ratios
    for result in measured:
        summary[result.method.spec]["advice"] = _advice(result, summary)
    return summary


def _advice(result: Measured, summary: dict[str, dict[str, Any]]) -> str | None:
    """A sentence for users if a method does not pay, else None; see `paradraft.decode.payoff.advice`.

    It is slower if its fastest run is slower than the slowest run of its AR+, by more than `Payoff.MARGIN`.
    """
    stats = [answer.stats for run in result.runs for answer in run if answer.stats is not None]
    rounds = sum(sum(counts.drafted[:1]) for counts in stats)
    if result.method.name in PEERS or not rounds:
        return None
    figures = summary[result.method.spec]
    plain_per_s = summary[figures["baseline"]]["tokens_per_s"]["runs"] if figures["baseline"] else [0.0]
    is_slower = Payoff.MARGIN * max(result.tokens_per_s) < min(plain_per_s) and rounds >= Payoff.LEAST_ROUNDS
    slower = 1.0 / figures["speedup_vs_ar"] if is_slower else None
    tokens = rounds + sum(sum(counts.accepted) for counts in stats)
    return advice(slower, result.method.speculation.instead, rounds=rounds, tokens=tokens)


def _reference(method: Method, measured: list[Measured]) -> Measured | None:
    """The AR+ whose texts a method is compared with."""
    plain = [m for m in measured if m.method.name == AR]
    whole = [m for m in plain if m.method.dtype not in QUANTIZED] or plain
    same_batch = [m for m in whole if m.method.batch == method.batch]
    fastest = max(same_batch or whole, key=lambda m: statistics.median(m.tokens_per_s), default=None)
    return next((m for m in plain if m.method.dtype == method.dtype), fastest)


def _rounds(result: Measured) -> dict[str, object]:
    """Acceptance and the split of the time, summed over all runs; None for what a peer does not report.

    `acceptance_per_position` counts, at each position, only the rounds whose draft was that deep. The denominator of
    `accepted_share_of_rounds` is all rounds, so that drafts of different lengths can be compared: its sum is the
    acceptance length less 1 (but for what the length limit cuts off).
    """
    answers = [answer for run in result.runs for answer in run]
    stats = [answer.stats for answer in answers if answer.stats is not None]
    counts: list[Stats] | list[PeerCounts] = stats or [answer.counts for answer in answers if answer.counts is not None]
    longest = max((len(c.drafted) for c in counts), default=0)
    drafted = [sum(c.drafted[i] for c in counts if i < len(c.drafted)) for i in range(longest)]
    accepted = [sum(c.accepted[i] for c in counts if i < len(c.accepted)) for i in range(longest)]
    rounds = sum(c.rounds for c in counts)
    return {
        "acceptance_length": sum(c.tokens for c in counts) / rounds if counts else None,
        "acceptance_length_first_32": first_length(by_round(answers)),
        "acceptance_per_position": [a / d for a, d in zip(accepted, drafted, strict=True) if d] if counts else None,
        "accepted_share_of_rounds": [a / rounds for a in accepted] if counts else None,
        "prefill_s": sum(s.prefill_s for s in stats) if stats else None,
        "draft_s": sum(s.draft_s for s in stats) if stats else None,
        "verify_s": sum(s.verify_s for s in stats) if stats else None,
        "other_s": sum(s.other_s for s in stats) if stats else None,
        "total_s": sum(answer.total_s for answer in answers),
    }


def _differing(result: Measured, reference: Measured) -> list[dict[str, int]]:
    """Run and prompt of each answer that differs, and its first token that does."""
    differences = []
    prompts = sum(len(answer.tokens) for answer in result.runs[0])
    for answer, (mine, theirs) in enumerate(zip(result.texts, reference.texts, strict=True)):
        if mine != theirs:
            same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            differences.append(
                {
                    "run": answer // prompts,
                    "prompt": answer % prompts,
                    "token": min(len(mine), len(theirs)) if same is None else same,
                }
            )
    return differences


def distinct_share(texts: list[list[int]]) -> float:
    """Distinct 4-grams over all 4-grams: low for texts that repeat themselves.

    >>> distinct_share([[1, 2, 3, 4, 5, 6]]), distinct_share([[1, 1, 1, 1, 1, 1]])
    (1.0, 0.3333333333333333)
    """
    ngrams = [[tuple(text[i : i + 4]) for i in range(len(text) - 3)] for text in texts]
    return sum(len(set(ngrams_of_text)) for ngrams_of_text in ngrams) / max(sum(map(len, ngrams)), 1)

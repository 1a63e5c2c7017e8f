"""Runs vLLM as a baseline in another process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paradraft.bench.baselines import is_vllm, vllm_worker
from paradraft.bench.baselines.process import EngineProcess, without_engine
from paradraft.bench.result import BatchResult, PeerCounts
from paradraft.bench.spec import Method
from paradraft.export.vllm import NOT_INSTALLED, installed_python, intel_openmp, python_to_run, speculative_config
from paradraft.models.runtime import QUANTIZED, Runtime
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import locate


class VllmProcess(EngineProcess):
    """A vLLM process.

    Args:
        python: see `python_to_run`.
        patience_s: timeout of loading, and of a batch. Compiling takes minutes on a slow CPU.
    """

    engine = "vLLM"
    key = "vllm"
    worker = vllm_worker.__file__

    def __init__(
        self, spec: str, python: Path | None, settings: dict[str, Any], target: Target, *, patience_s: float = 1800.0
    ) -> None:
        python = python_to_run(python)
        super().__init__(spec, python, settings, target, patience_s=patience_s, environment=intel_openmp(python))
        self._k = (settings["speculative"] or {}).get("num_speculative_tokens", 0)
        self._counts: dict[tuple[object, ...], PeerCounts] = {}

    def __call__(self, prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
        """Answers a batch, as an `Answerer`."""
        assert sampling.is_greedy, "refused when the method was read"
        # A greedy answer is the same each time: it is counted once.
        key = (max_new_tokens, *prompts)
        count = bool(self._k) and key not in self._counts
        request = {"max_new_tokens": max_new_tokens, "eos_ids": sorted(self._target.eos_ids), "count": count}
        keys = ("total_s", "peak_rss_bytes", *(("drafts", "accepted") if count else ()))
        reply = self._answers(prompts, request, keys)
        tokens = reply["tokens"]
        if count:
            total = sum(map(len, tokens))
            self._counts[key] = PeerCounts(
                tokens=total,
                # The pass that reads the prompt gives a token too, before anything is drafted. So does every pass for
                # which n-grams found nothing, and vLLM counts none of those; each pass gives one token of the target's.
                rounds=max(reply["drafts"][0] + len(tokens), total - sum(reply["accepted"])),
                drafted=tuple(reply["drafts"] * self._k),
                accepted=tuple(reply["accepted"]),
            )
        return BatchResult(
            tokens=tokens,
            total_s=reply["total_s"],
            stats=None,
            counts=self._counts.get(key),
            peak_rss_bytes=reply["peak_rss_bytes"],
        )


def without_vllm(methods: Sequence[Method], python: Path | None) -> tuple[list[Method], dict[str, str]]:
    """Leaves out methods that need vLLM where it is not installed; see `without_engine`."""
    needed = any(is_vllm(method.name) for method in methods)
    return without_engine(methods, is_vllm, installed_python(python) if needed else None, NOT_INSTALLED)


def check_vllm(methods: Sequence[Method], sampling: Sampling, runtime: Runtime) -> None:
    """Raises ValueError if a method that runs in vLLM cannot be compared under these settings."""
    for method in methods:
        if is_vllm(method.name) and not sampling.is_greedy:
            raise ValueError(
                f"method {method.spec!r}: greedy only, use --temperature 0: "
                "vLLM's speculation on a CPU is not lossless when it samples"
            )
        if is_vllm(method.name) and method.dtype in QUANTIZED:
            raise ValueError(
                f"method {method.spec!r}: vLLM does not round weights as dtype={method.dtype!r} does: use float32 or "
                "bfloat16"
            )
        if is_vllm(method.name) and torch.device(runtime.device).type != "cpu":
            raise ValueError(f"method {method.spec!r}: vLLM is compared on the CPU only, use --device cpu")


def worker_settings(method: Method, name: str, target: Target, *, compiled: bool) -> dict[str, Any]:
    """The settings of the worker for a method, see `vllm_worker.VllmWorker`.

    Args:
        name: of the target, as the user wrote it.
        compiled: whether vLLM compiles its passes, as ours are.

    Raises:
        ValueError: vLLM cannot use the draft.
    """
    folder = locate(name, "target")
    try:
        speculative = speculative_config(method.speculation, folder)
    except ValueError as error:
        raise ValueError(f"method {method.spec!r}: {error}") from None
    return {
        "model": folder,
        "dtype": method.dtype,
        "capacity": target.capacity,
        "batch": method.batch,
        "compiled": compiled,
        "threads": torch.get_num_threads(),
        "speculative": speculative,
    }

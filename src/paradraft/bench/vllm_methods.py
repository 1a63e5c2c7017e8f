"""The methods that run in vLLM: where it is, what it can do, and what it is to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from paradraft.bench.answer import Answerer
from paradraft.bench.methods import Method
from paradraft.bench.peers import PEERS, is_vllm
from paradraft.bench.vllm_process import DEFAULT_PYTHON, VllmProcess
from paradraft.core import Drafter, Sampling
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.drafters.ngram import NgramDrafter
from paradraft.drafters.pard import PardDrafter
from paradraft.models.loading import locate
from paradraft.models.runtime import QUANTIZED, Runtime
from paradraft.models.target import Target


def without_vllm(methods: Sequence[Method], python: Path | None) -> tuple[list[Method], dict[str, str]]:
    """Leaves out what needs vLLM where it is not installed.

    Args:
        methods: of a benchmark.
        python: the Python of vLLM's environment, if the user named one; else it is looked for at `DEFAULT_PYTHON`.

    Returns:
        The methods that can run, and for each of the others a sentence that says why not.

    Raises:
        ValueError: the user named a Python that does not exist, or nothing is left.
    """
    wanted = [method.spec for method in methods if is_vllm(method.name)]
    if not wanted or (python or DEFAULT_PYTHON).is_file():
        return list(methods), {}
    if python is not None:
        raise ValueError(f"--vllm-python {str(python)!r}: there is no such file; name the Python of vLLM's environment")
    why = f"vLLM is not installed: {DEFAULT_PYTHON} does not exist. Run `make vllm`, or name its Python: --vllm-python."
    left = [method for method in methods if not is_vllm(method.name)]
    if not left:
        raise ValueError(f"methods: only {', '.join(wanted)}, but {why}")
    return left, dict.fromkeys(wanted, why)


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


@contextmanager
def running(answerers: Iterable[Answerer], report: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Loads vLLM for those of the answerers that run there, and ends it in the end.

    Yields:
        `{"vllm": version}`; nothing if none of them does.

    Raises:
        ValueError: it cannot be loaded.
    """
    versions = {}
    with ExitStack() as processes:
        for one in answerers:
            if isinstance(one, VllmProcess):
                report(f"loading vLLM for {one.spec}")
                versions["vllm"] = processes.enter_context(one).version
        yield versions


def what_to_load(method: Method, name: str, target: Target, drafter: Drafter, *, compiled: bool) -> dict[str, Any]:
    """What vLLM is told to load for a method; see `vllm_worker.Worker`.

    Args:
        method: one that `is_vllm`.
        name: the target's, as the user gave it.
        target: ours, loaded.
        drafter: ours that drafts in the same way.
        compiled: whether it shall compile its passes, as ours are.

    Raises:
        ValueError: vLLM has no use for the draft.
    """
    return {
        "model": locate(name, "target"),
        "dtype": method.dtype,
        "capacity": target.capacity,
        "batch": method.batch,
        "compiled": compiled,
        "threads": torch.get_num_threads(),
        "speculative": _speculative(method, target, drafter),
    }


def _speculative(method: Method, target: Target, drafter: Drafter) -> dict[str, Any] | None:
    """What vLLM calls `speculative_config`."""
    if PEERS[method.name].like == "none":
        return None
    if isinstance(drafter, NgramDrafter):
        longest = drafter.config.max_ngram
        return {
            "method": "ngram",
            "num_speculative_tokens": method.k,
            "prompt_lookup_max": longest,
            "prompt_lookup_min": 1,
        }
    assert isinstance(drafter, AutoregressiveDrafter | PardDrafter)
    ours, theirs = (lm.model.config.vocab_size for lm in (target.lm, drafter.lm))
    if ours != theirs:
        raise ValueError(
            f"method {method.spec!r}: vLLM wants a draft with as many embedding rows as the target has, {ours}, not "
            f"{theirs}: `paradraft init-draft --from` makes one"
        )
    is_parallel = isinstance(drafter, PardDrafter)
    if isinstance(drafter, PardDrafter) and drafter.masks > 1:
        raise ValueError(f"method {method.spec!r}: the draft has {drafter.masks} mask tokens, vLLM knows one")
    config = {"method": "draft_model", "num_speculative_tokens": method.k}
    config["model"] = locate(method.draft or "pocket", "pard" if is_parallel else "draft")
    return config | ({"parallel_drafting": True} if is_parallel else {})

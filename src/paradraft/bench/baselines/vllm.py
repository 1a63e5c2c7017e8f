"""vLLM as a baseline, in a process of its own, run by another environment's Python: it is never imported here.

The process loads its model once and answers requests over pipes, so that its answers can take turns with those of our
own methods. It times itself, so the pipes are not in the times.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self

import torch

from paradraft.bench.baselines import is_vllm, vllm_worker
from paradraft.bench.result import Answerer, BatchResult, Counts
from paradraft.bench.spec import Method
from paradraft.export.vllm import DEFAULT_PYTHON, NOT_INSTALLED, installed_python, intel_openmp, speculative_config
from paradraft.models.loading import locate
from paradraft.models.runtime import QUANTIZED, Runtime
from paradraft.models.target import Target
from paradraft.models.tokenization import encode_prompt
from paradraft.sampling_params import Sampling


class VllmProcess:
    """One vLLM, an `Answerer` while it is entered as a context.

    Args:
        spec: the method, for messages.
        python: the Python of vLLM's environment; None for `DEFAULT_PYTHON`.
        given: what to load, see `vllm_worker.Worker`, and how many CPU `threads` to use.
        target: ours, for its tokens.
        patience_s: how long loading, or one batch, may take. Compiling takes minutes on a slow CPU.
    """

    version: str
    """Of vLLM, once it is loaded."""
    _process: subprocess.Popen[str]

    def __init__(
        self, spec: str, python: Path | None, given: dict[str, Any], target: Target, *, patience_s: float = 1800.0
    ) -> None:
        self.spec = spec
        self._python = python or DEFAULT_PYTHON
        self._given = given
        self._target = target
        self._k = (given["speculative"] or {}).get("num_speculative_tokens", 0)
        self._patience_s = patience_s
        self._counts: dict[tuple[object, ...], Counts] = {}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `__exit__`
        self._replies: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        """Starts it and waits until it is loaded.

        Raises:
            ValueError: it cannot be started or cannot load.
        """
        try:
            self._process = subprocess.Popen(
                # Isolated: neither our modules nor those beside the script may stand in for its own.
                [self._python, "-I", vllm_worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | {"OMP_NUM_THREADS": str(self._given["threads"])} | intel_openmp(self._python),
                encoding="utf-8",
            )
        except OSError as error:
            raise ValueError(f"method {self.spec!r}: {str(self._python)!r} cannot be run ({error.strerror})") from None
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.version = str(self._ask(self._given, ("vllm",))["vllm"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # what it was told last was never read
            self._process.stdin.close()
        self._end()
        self._process.stdout.close()
        self._log.close()

    def __call__(self, prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
        """Answers a batch, as an `Answerer`.

        Raises:
            ValueError: the process has ended, is silent, or says what cannot be understood.
        """
        assert sampling.is_greedy, "refused when the method was read"
        rows = [encode_prompt(prompt, self._target.tokenizer) for prompt in prompts]
        # A greedy answer is the same each time: it is counted once.
        known = (max_new_tokens, *prompts)
        count = bool(self._k) and known not in self._counts
        request = {"prompts": rows, "max_new_tokens": max_new_tokens, "eos_ids": sorted(self._target.eos_ids)}
        keys = ("tokens", "total_s", "peak_rss_bytes", *(("drafts", "accepted") if count else ()))
        reply = self._ask(request | {"count": count}, keys)
        tokens = reply["tokens"]
        if len(tokens) != len(rows):
            raise ValueError(f"method {self.spec!r}: vLLM gave {len(tokens)} answers to {len(rows)} prompts")
        if count:
            total = sum(map(len, tokens))
            self._counts[known] = Counts(
                tokens=total,
                # The pass that reads the prompt gives a token too, before anything is drafted. So does every pass for
                # which n-grams found nothing, and vLLM counts none of those; each pass gives one token of the target's.
                rounds=max(reply["drafts"][0] + len(rows), total - sum(reply["accepted"])),
                drafted=tuple(reply["drafts"] * self._k),
                accepted=tuple(reply["accepted"]),
            )
        return BatchResult(
            tokens=tokens,
            total_s=reply["total_s"],
            stats=None,
            counts=self._counts.get(known),
            peak_rss_bytes=reply["peak_rss_bytes"],
        )

    def _end(self) -> int:
        """Its exit code; it is killed if it does not end by itself."""
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._replies.put(line)
        except ValueError:  # closed at the end, or not UTF-8
            pass
        self._replies.put("")

    def _ask(self, message: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        """Sends a message and waits for the reply, which must have these keys."""
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended, and may have said why
                print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._replies.get(timeout=self._patience_s)
        except queue.Empty:
            self._process.kill()
            raise ValueError(
                f"method {self.spec!r}: vLLM has said nothing for {self._patience_s:.0f} s{self._last_words()}"
            ) from None
        if not line:
            code = self._end()
            raise ValueError(f"method {self.spec!r}: vLLM's process ended with code {code}{self._last_words()}")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not ("error" in reply or all(key in reply for key in keys)):
            raise ValueError(f"method {self.spec!r}: vLLM's process says what is no reply: {line.strip()[:80]!r}")
        if "error" in reply:
            raise ValueError(f"method {self.spec!r}: vLLM: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        """The last line of its standard error, to be put after a sentence."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


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
    if not wanted or installed_python(python) is not None:
        return list(methods), {}
    left = [method for method in methods if not is_vllm(method.name)]
    if not left:
        raise ValueError(f"methods: only {', '.join(wanted)}, but {NOT_INSTALLED}")
    return left, dict.fromkeys(wanted, NOT_INSTALLED)


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


def what_to_load(method: Method, name: str, target: Target, *, compiled: bool) -> dict[str, Any]:
    """What vLLM is told to load for a method; see `vllm_worker.Worker`.

    Args:
        method: one that `is_vllm`.
        name: the target's, as the user gave it.
        target: ours, loaded.
        compiled: whether it shall compile its passes, as ours are.

    Raises:
        ValueError: vLLM has no use for the draft.
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

"""Runs llama.cpp as a baseline in another process: plain decoding, and with a draft model.

Models are written as GGUF files into a folder of llama.cpp's environment, once: the name of a file has a digest of its
content. A model that is a GGUF file already is loaded as it is.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from paradraft.bench.baselines import is_llama_cpp, llama_cpp_worker
from paradraft.bench.baselines.process import EngineProcess, without_engine
from paradraft.bench.result import BatchResult, PeerCounts
from paradraft.bench.spec import Method
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.digests import model_digest
from paradraft.export.gguf import TYPES, check_config, write_gguf
from paradraft.files import temporary_beside
from paradraft.models.devices import TORCH_DTYPES, computes_bf16
from paradraft.models.names import POCKET, PREFIX, is_shape
from paradraft.models.runtime import QUANTIZED, Runtime
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import config_of, load_model, locate
from paradraft.sources.presets import random_model, shape_of
from paradraft.text.generation_config import suppressed_ids

DEFAULT_PYTHON = Path("build/llama-cpp/bin/python")
"""The Python of the environment that `make llama-cpp` creates."""
NOT_INSTALLED = (
    f"llama.cpp is not installed in {DEFAULT_PYTHON.parent.parent}. Run `make llama-cpp`, or name its Python: "
    "--llama-cpp-python."
)
PACKAGE = "lib/python*/site-packages/llama_cpp*"
"""Path of llama-cpp-python in the folder of an environment."""
ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
"""Files of which every environment has one."""
GGUF = ".gguf"
WRITTEN = 2
"""Version of the writer; raised with every change, so that older files are not reused."""


class LlamaCppProcess(EngineProcess):
    """A llama.cpp process.

    Args:
        python: the Python of llama.cpp's environment; None for `DEFAULT_PYTHON`.
        acceptance: replaces the verdicts of the target.
        patience_s: timeout of loading, and of a batch.
    """

    engine = "llama.cpp"
    key = "llama_cpp"
    worker = llama_cpp_worker.__file__

    def __init__(
        self,
        spec: str,
        python: Path | None,
        settings: dict[str, Any],
        target: Target,
        *,
        acceptance: SyntheticAcceptance | None = None,
        patience_s: float = 1800.0,
    ) -> None:
        super().__init__(spec, python or DEFAULT_PYTHON, settings, target, patience_s=patience_s, environment={})
        self._acceptance = acceptance
        self._drafts = settings["draft"] is not None

    def __call__(self, prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
        """Answers a batch, as an `Answerer`."""
        assert sampling.is_greedy, "refused when the method was read"
        drawn = None
        if self._acceptance is not None and self._drafts:
            numbers = [_numbers(prompt, sampling.seed, max_new_tokens) for prompt in prompts]
            drawn = {"rates": self._acceptance.rates, "numbers": numbers}
        request = {"max_new_tokens": max_new_tokens, "eos_ids": sorted(self._target.eos_ids), "drawn": drawn}
        keys = ("total_s", "accepted", "drafted", "delivered_s", "passes", "peak_rss_bytes")
        reply = self._answers(prompts, request, keys)
        drafted, accepted = (chain.from_iterable(reply[key]) for key in ("drafted", "accepted"))
        counts = PeerCounts.of(sum(map(len, reply["tokens"])), drafted, accepted)
        return BatchResult(
            tokens=reply["tokens"],
            total_s=reply["total_s"],
            stats=None,
            counts=counts if self._drafts else None,
            accepted=reply["accepted"] if self._drafts and drawn is None else None,
            peak_rss_bytes=reply["peak_rss_bytes"],
            delivered_s=reply["delivered_s"],
            engine_passes=reply["passes"],
        )


def _numbers(prompt: str, seed: int, count: int) -> list[float]:
    """For each token of an answer the number that decides how many of the tokens drafted there are accepted."""
    chooser = random.Random(f"{seed} {prompt}")
    return [chooser.random() for _ in range(count)]


def environment_of(python: Path) -> Path:
    """The folder of an environment; its Python may be a link to another environment's."""
    return python.absolute().parent.parent


def installed_python(named: Path | None) -> Path | None:
    """The Python of llama.cpp's environment; None where it is not installed.

    Raises:
        ValueError: the user named a Python that does not exist, is the system's, or is without llama-cpp-python.
    """
    if named is not None and not named.is_file():
        raise ValueError(
            f"--llama-cpp-python {str(named)!r}: there is no such file; name the Python of llama.cpp's environment"
        )
    if named is not None and not any((environment_of(named) / name).exists() for name in ENVIRONMENTS):
        raise ValueError(
            f"--llama-cpp-python {str(named)!r} is in no environment of its own, into which models could be written: "
            "make one by python -m venv"
        )
    # Checked before models are written there, and for a build that was stopped too.
    has_package = any(environment_of(named or DEFAULT_PYTHON).glob(PACKAGE))
    if named is not None and not has_package:
        raise ValueError(
            f"--llama-cpp-python {str(named)!r}: its environment has no llama-cpp-python: install it there"
        )
    return (named or DEFAULT_PYTHON) if has_package else None


def without_llama_cpp(methods: Sequence[Method], python: Path | None) -> tuple[list[Method], dict[str, str]]:
    """Leaves out methods that need llama.cpp where it is not installed; see `without_engine`."""
    needed = any(is_llama_cpp(method.name) for method in methods)
    return without_engine(methods, is_llama_cpp, installed_python(python) if needed else None, NOT_INSTALLED)


def check_llama_cpp(methods: Sequence[Method], target: str, sampling: Sampling, runtime: Runtime) -> None:
    """Raises ValueError if a method that runs in llama.cpp cannot be compared under these settings."""
    for method in methods:
        if not is_llama_cpp(method.name):
            continue
        if not sampling.is_greedy:
            raise ValueError(f"method {method.spec!r}: llama.cpp is compared greedily only, use --temperature 0")
        if torch.device(runtime.device).type != "cpu":
            raise ValueError(f"method {method.spec!r}: llama.cpp is compared on the CPU only, use --device cpu")
        try:
            for model, role in _models(method, target):
                if not (folder := locate_model(model, role)).endswith(GGUF):
                    _check_folder(folder, method.dtype)
        except ValueError as error:
            raise ValueError(f"method {method.spec!r}: {error}") from None


def _check_folder(folder: str, dtype: str) -> None:
    if dtype not in TYPES:
        raise ValueError(f"llama.cpp has no weights in {dtype!r}: use one of {', '.join(TYPES)}")
    check_config(config_of(folder), folder)


def worker_settings(
    method: Method, name: str, target: Target, python: Path | None, report: Callable[[str], None]
) -> dict[str, Any]:
    """The settings of the worker for a method, see `llama_cpp_worker.LlamaCppWorker`. Writes the GGUF files.

    Args:
        name: of the target, as the user wrote it.

    Raises:
        ValueError: llama.cpp cannot compute one of the models, or its file cannot be written.
    """
    cache = environment_of(python or DEFAULT_PYTHON) / "gguf"
    try:
        files = {
            role: model_file(locate_model(model, role), method.dtype, cache, report)
            for model, role in _models(method, name)
        }
    except ValueError as error:
        raise ValueError(f"method {method.spec!r}: {error}") from None
    return {
        "target": files["target"],
        "draft": files.get("draft"),
        "k": method.speculation.k,
        "batch": method.batch,
        "exact": method.dtype == "float32",
        "threads": torch.get_num_threads(),
        "tokens": target.vocab_size,
        "forbidden": sorted(suppressed_ids(target.lm.model.generation_config)),
    }


def _models(method: Method, target: str) -> list[tuple[str, str]]:
    """The models of a method, with their roles."""
    drafts = method.speculation.drafter != "none"
    return [(target, "target"), *([(method.speculation.draft or POCKET, "draft")] if drafts else [])]


def locate_model(name: str, role: str) -> str:
    """The folder or Hugging Face id of a model, as `locate`, or the path of a GGUF file."""
    return name if name.endswith(GGUF) and Path(name).is_file() else locate(name, role)


def model_file(folder: str, dtype: str, cache: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """The GGUF file of a model, written if it is missing, as `files` of `llama_cpp_worker.Model`."""
    if folder.endswith(GGUF):
        return {"file": str(Path(folder).absolute())}
    whole = whole_dtype(dtype)
    base = f"{Path(folder.removeprefix(PREFIX)).name}-{_digest(folder, whole)}"
    source, rounded = (cache / f"{base}-{TYPES[kind]}{GGUF}" for kind in (whole, dtype))
    if rounded.is_file():
        return {"file": str(rounded)}
    if not source.is_file():
        report(f"writing {source.name} for llama.cpp")
        try:
            cache.mkdir(exist_ok=True)
            with temporary_beside(source) as new:
                write_gguf(new, _model(folder, whole), None, dtype=whole, name=base)
                os.replace(new, source)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"{str(source)!r} cannot be written ({reason}): name a Python whose environment has room for it"
            ) from None
    if dtype not in QUANTIZED:
        return {"file": str(source)}
    return {"file": str(rounded), "source": str(source), "type": TYPES[dtype]}


def whole_dtype(dtype: str) -> str:
    """The dtype of weights before they are quantized, as ours are: bfloat16, or float32 where that is faster."""
    if dtype not in QUANTIZED:
        return dtype
    return "bfloat16" if computes_bf16(torch.device("cpu")) else "float32"


def _model(folder: str, dtype: str) -> PreTrainedModel:
    if is_shape(folder):
        return random_model(folder, dtype=TORCH_DTYPES[dtype], device="cpu")
    return load_model(folder, Runtime(device="cpu", dtype=dtype))


def _digest(folder: str, dtype: str) -> str:
    """Identifies a model's file."""
    if is_shape(folder):
        identity = f"{shape_of(folder)} torch {torch.__version__} transformers {transformers_version}"
    elif Path(folder).is_dir():
        identity = model_digest(Path(folder))
    else:
        known = try_to_load_from_cache(folder, "config.json")
        assert isinstance(known, str), "it has been loaded before"
        identity = model_digest(Path(known).parent)
    return hashlib.sha256(f"{WRITTEN} {identity} {dtype}".encode()).hexdigest()[:16]

"""`paradraft serve --engine vllm`: maps options to vLLM's, and refuses options that vLLM lacks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import typer

from paradraft.cli import options
from paradraft.cli.model_sampling import Choice
from paradraft.engine.speculation import Speculation
from paradraft.export.vllm import DEFAULT_PYTHON, speculative_config
from paradraft.formats.pard import RANK
from paradraft.models.config_check import check_capacity
from paradraft.models.runtime import AUTO, Runtime
from paradraft.placement import Placement
from paradraft.plan.plan_file import read_chains
from paradraft.serve.address import key_of
from paradraft.serve.limits import Limits
from paradraft.serve.vllm import DTYPES, VllmServer
from paradraft.sources.loading import load_config, locate
from paradraft.verify import rule_class

ONLY_VLLM = (
    "plan", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "vllm_python", "dry_run",
)  # fmt: skip
CHAINS = "vLLM drafts chains, leave it out"
TURNS = "there drafter and target take turns, leave it out"
LIMIT = "vLLM has no such limit: leave it out, and set one in a proxy before it"
REFUSED = {
    "tree_budget": CHAINS,
    "tree_paths": CHAINS,
    "lengths": "vLLM has no such policy: leave it out, or give the K of each batch size by --plan",
    "gamma": TURNS,
    "draft_dtype": "vLLM's drafters have the dtype of its target: leave it out",
    "draft_cpus": TURNS,
    "draft_device": TURNS,
    "target_cpus": "start the command by taskset, or set VLLM_CPU_OMP_THREADS_BIND",
    "target_stages": "use --pipeline-parallel-size",
    "max_queue": LIMIT,
    "max_body_bytes": LIMIT,
    "timeout_s": LIMIT,
}
"""Options that vLLM lacks, and the fix for each."""


def refuse_others(context: typer.Context) -> None:
    """Raises ValueError for an option that only `--engine vllm` has."""
    for option in options.given(context, ONLY_VLLM):
        raise ValueError(f"{option} is for --engine vllm: add that, or leave it out")


def command_of(
    context: typer.Context,
    *,
    target: str,
    speculation: Speculation,
    plan: Path | None,
    host: str,
    port: int,
    limits: Limits,
    api_key_env: str | None,
    served_model_name: str | None,
    runtime: Runtime,
    threads: int | None,
    placement: Placement,
    python: Path | None,
    generation_config: Choice,
    sizes: Mapping[str, int],
) -> VllmServer:
    """vLLM's server for the options of `paradraft serve`; warns of options without effect.

    Raises ValueError for options that vLLM lacks and models that it could not load.
    """
    for name, fix in REFUSED.items():
        for option in options.given(context, (name,)):
            raise ValueError(f"{option} with --engine vllm: {fix}")
    if (rule := rule_class(speculation.verify)).warning is not None:
        raise ValueError(f"--verify {speculation.verify} with --engine vllm: vLLM's rule is lossless, leave it out")
    if runtime.dtype not in (AUTO, *DTYPES):
        raise ValueError(f"--dtype {runtime.dtype} with --engine vllm: use {', '.join(DTYPES)} or auto")
    key_of(api_key_env, host)
    folder = locate(target, "target")
    chosen = None if plan is None else read_chains(plan, target, speculation)
    if chosen is not None and sizes["--data-parallel-size"] > 1:
        raise ValueError(
            "--plan with --data-parallel-size: vLLM then drafts one K at every batch size, give that by -k"
        )
    speculative = speculative_config(speculation, folder, chosen)
    server = VllmServer(
        python=python or DEFAULT_PYTHON,
        target=folder,
        speculative=speculative,
        options=_settings(context, folder, host=host, port=port, limits=limits, runtime=runtime, sizes=sizes)
        | _name(target, folder, served_model_name)
        | ({"--generation-config": "vllm"} if generation_config == "none" else {}),
        eager=runtime.compiled is False,
        threads=threads,
        device=_device(runtime.device, sizes),
        key_variable=api_key_env,
    )
    if (
        speculative is not None
        and "parallel_drafting" in speculative
        and hasattr(load_config(speculative["model"]), RANK)
    ):
        print("warning: vLLM does not read the previous-token head of this drafter, and accepts less", file=sys.stderr)
    options.warn_ignored(
        context,
        options.without_drafter(speculation),
        (plan is not None, "with --plan", ("k",)),
        (True, "with --engine vllm", ("kept_rows", "draft_timeout_s")),
        (rule.same_tokens, "with --engine vllm, which verifies by rejection when it samples", ("verify",)),
    )
    return server


def _settings(
    context: typer.Context,
    folder: str,
    *,
    host: str,
    port: int,
    limits: Limits,
    runtime: Runtime,
    sizes: Mapping[str, int],
) -> dict[str, object]:
    """vLLM's names of the options that are set, or whose default differs there."""
    config = load_config(folder)
    check_capacity(runtime.capacity, config.max_position_embeddings)
    # vLLM's "auto" rounds float32 checkpoints.
    is_float32 = runtime.dtype == AUTO and config.dtype in (torch.float32, "float32")
    settings: dict[str, object] = {"--host": host, "--port": port}
    if is_float32 or runtime.dtype != AUTO:
        settings["--dtype"] = "float32" if is_float32 else runtime.dtype
    if runtime.capacity is not None:
        settings["--max-model-len"] = runtime.capacity
    if runtime.tokenizer is not None:
        settings["--tokenizer"] = runtime.tokenizer
    renamed = {
        "max_batch": ("--max-num-seqs", limits.max_batch),
        "max_new_tokens": ("--override-generation-config", json.dumps({"max_new_tokens": limits.max_new_tokens})),
        "drain_s": ("--shutdown-timeout", math.ceil(limits.drain_s)),
    }
    settings |= dict(value for name, value in renamed.items() if options.given(context, (name,)))
    return settings | {name: size for name, size in sizes.items() if size > 1}


def _name(target: str, folder: str, served: str | None) -> dict[str, object]:
    """Served model name, if it differs from vLLM's default."""
    return {} if served is None and folder == target else {"--served-model-name": served or target}


def _device(device: str, sizes: Mapping[str, int]) -> int | None:
    index = None if device == AUTO else torch.device(device).index
    if index is not None and max(sizes.values()) > 1:
        raise ValueError(f"--device {device} is one device: name several by CUDA_VISIBLE_DEVICES")
    return index

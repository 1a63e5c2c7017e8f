"""`paradraft serve --engine vllm`: maps options to vLLM's, and refuses options that vLLM lacks."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import typer

from paradraft.cli.ignored import given, refuse, warn_ignored, without_drafter
from paradraft.engine.automatic import drafter_of
from paradraft.export.vllm import python_to_run, speculative_config
from paradraft.formats.pard import RANK
from paradraft.models.config_check import check_capacity
from paradraft.models.runtime import AUTO
from paradraft.plan.plan_file import read_chains
from paradraft.serve.address import key_of
from paradraft.serve.vllm import DTYPES, VllmServer
from paradraft.sources.loading import load_config, locate
from paradraft.verify import rule_class

if TYPE_CHECKING:
    from paradraft.cli.commands.serve import ServeArgs

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
    "rounds": "vLLM writes no rounds: leave it out",
    "adapt": "vLLM writes no rounds to learn from: leave it out",
    "max_queue": LIMIT,
    "max_body_bytes": LIMIT,
    "timeout_s": LIMIT,
}
"""Options that vLLM lacks, and the fix for each."""


def command_of(context: typer.Context, args: ServeArgs) -> VllmServer:
    """vLLM's server for the options of `paradraft serve`; warns of options without effect.

    Raises ValueError for options that vLLM lacks and models that it could not load.
    """
    runtime = args.runtime
    speculation = args.speculation
    if speculation.drafter == AUTO:
        speculation = replace(
            speculation, drafter="none" if speculation.draft is None else drafter_of(speculation.draft)
        )
    for name, fix in REFUSED.items():
        refuse(context, (name,), f"with --engine vllm: {fix}")
    if (rule := rule_class(speculation.verify)).warning is not None:
        raise ValueError(f"--verify {speculation.verify} with --engine vllm: vLLM's rule is lossless, leave it out")
    if runtime.dtype not in (AUTO, *DTYPES):
        raise ValueError(f"--dtype {runtime.dtype} with --engine vllm: use {', '.join(DTYPES)} or auto")
    key_of(args.api_key_env, args.host)
    folder = locate(args.target, "target")
    chosen = None if args.plan is None else read_chains(args.plan, args.target, speculation)
    if chosen is not None and args.data_parallel_size > 1:
        raise ValueError(
            "--plan with --data-parallel-size: vLLM then drafts one K at every batch size, give that by -k"
        )
    speculative = speculative_config(speculation, folder, chosen)
    server = VllmServer(
        python=python_to_run(args.vllm_python),
        target=folder,
        speculative=speculative,
        options=_settings(context, folder, args),
        eager=runtime.compiled is False,
        threads=args.threads,
        device=_device(args),
        key_variable=args.api_key_env,
    )
    if (
        speculative is not None
        and "parallel_drafting" in speculative
        and hasattr(load_config(speculative["model"]), RANK)
    ):
        print("warning: vLLM does not read the previous-token head of this drafter, and accepts less", file=sys.stderr)
    warn_ignored(
        context,
        without_drafter(speculation),
        (args.plan is not None, "with --plan", ("k",)),
        (True, "with --engine vllm", ("kept_rows", "draft_timeout_s")),
        (not rule.is_of_vllm, "with --engine vllm, which verifies by rejection when it samples", ("verify",)),
    )
    return server


def _settings(context: typer.Context, folder: str, args: ServeArgs) -> dict[str, object]:
    """vLLM's names of the options that are set, or whose default differs there."""
    config, runtime, limits = load_config(folder), args.runtime, args.limits
    check_capacity(runtime.capacity, config.max_position_embeddings)
    # vLLM's "auto" rounds float32 checkpoints.
    is_float32 = runtime.dtype == AUTO and config.dtype in (torch.float32, "float32")
    settings: dict[str, object] = {"--host": args.host, "--port": args.port}
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
    settings |= dict(value for name, value in renamed.items() if given(context, (name,)))
    settings |= {name: size for name, size in _sizes(args).items() if size > 1}
    if args.served_model_name is not None or folder != args.target:  # else vLLM's default
        settings["--served-model-name"] = args.served_model_name or args.target
    return settings | ({"--generation-config": "vllm"} if args.generation_config == "none" else {})


def _sizes(args: ServeArgs) -> dict[str, int]:
    return {
        "--tensor-parallel-size": args.tensor_parallel_size, "--pipeline-parallel-size": args.pipeline_parallel_size,
        "--data-parallel-size": args.data_parallel_size,
    }  # fmt: skip


def _device(args: ServeArgs) -> int | None:
    device = args.runtime.device
    index = None if device == AUTO else torch.device(device).index
    if index is not None and max(_sizes(args).values()) > 1:
        raise ValueError(f"--device {device} is one device: name several by CUDA_VISIBLE_DEVICES")
    return index

"""Loads a target and its drafter onto their devices and CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from paradraft.core import Drafter
from paradraft.decode.pearl.channel import launched, met
from paradraft.decode.pearl.drafter_process import DraftServer
from paradraft.decode.pearl.pearl_colocated import CoLocatedDrafter
from paradraft.decode.pearl.remote import DrafterProcess
from paradraft.drafters import drafter_class, load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.preflight import fitted
from paradraft.engine.speculation import Speculation
from paradraft.errors import one_line
from paradraft.models.runtime import AUTO, Runtime
from paradraft.models.target import Target
from paradraft.placement import Placement, on_cpus
from paradraft.sources.loading import settled
from paradraft.sources.target_loading import load_target
from paradraft.tree import Tree

BY_MODEL = Runtime()
HERE = Placement()


def load(
    target: str,
    *,
    drafter: str = "none",
    draft: str | None = None,
    k: int = 8,
    verify: str = "match",
    tree: Tree | int | None = None,
    lengths: str = AUTO,
    gamma: int | Literal["auto"] | None = None,
    kept_rows: int = 0,
    device: str = AUTO,
    dtype: str | torch.dtype = AUTO,
    runtime: Runtime = BY_MODEL,
    placement: Placement = HERE,
) -> Engine:
    """Loads a target and a drafter.

    Args:
        target: a Hugging Face id, a folder, a .gguf file, or "pocket".
        drafter: one of `drafter_names()` or several, with settings, as in "ngram:max_ngram=5+pard"; "none" for plain.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round (depth of the draft), at least 1.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same
            distribution and accepts more when sampling; "typical" is not lossless.
        tree: draft trees instead of chains: a `Tree`, or a node budget.
        lengths: draft length policy: "fixed" drafts all k tokens, "heuristic" more after success, "confidence" while
            the drafter is sure, "expected" the fastest length on this machine; "auto" is "expected" where that cannot
            change a text, else "fixed".
        gamma: draft while the target verifies (PEARL), this many tokens ahead; "auto": the fastest number here.
        kept_rows: finished requests whose KV cache is kept for prefix reuse: a prompt that begins with such a prompt
            and its answer, as the next turn of a conversation does, is prefilled from there.
        device: "cpu", "cuda", "cuda:1" and the like; "auto": a GPU if there is one.
        dtype: "bfloat16", "float16", "float32", "float64" or torch's names; "int8" and "int4" for the weights; "auto":
            that of the target's checkpoint.
        runtime: compilation, pass width, capacity, tokenizer, the draft's dtype; device and dtype too, unless passed
            above.
        placement: devices and CPUs of target and drafter; by default both run in this process.

    Raises:
        ValueError: a name or setting is unknown, or the draft does not fit the target.
    """
    if not isinstance(target, str):
        raise ValueError(f"target={one_line(target)}: use a Hugging Face id, a folder, or 'pocket'")
    dtype = str(dtype).removeprefix("torch.")
    shape = tree if tree is None or isinstance(tree, Tree) else Tree(budget=tree)
    speculation = Speculation(
        drafter=drafter, draft=draft, k=k, verify=verify, tree=shape, lengths=lengths, gamma=gamma
    )
    if not isinstance(runtime, Runtime):
        raise ValueError(f"runtime={one_line(runtime)}: use a Runtime, such as Runtime(capacity=8192)")
    for name, value in (("device", device), ("dtype", dtype)):
        if value != AUTO and (other := getattr(runtime, name)) not in (AUTO, value):
            raise ValueError(f"{name}={value!r}: runtime says {other!r}, give it once")
    runtime = replace(
        runtime,
        device=runtime.device if device == AUTO else device,
        dtype=runtime.dtype if dtype == AUTO else dtype,
    )
    return load_engine(target, speculation, kept_rows=kept_rows, runtime=runtime, placement=placement)


def load_engine(
    target: str,
    speculation: Speculation,
    *,
    kept_rows: int = 0,
    runtime: Runtime = BY_MODEL,
    placement: Placement = HERE,
    tries_plain: bool = False,
) -> Engine:
    """`load` with its settings in a `Speculation`, and the same errors.

    With `tries_plain` a few rounds draft nothing, where that changes no text, to time plain decoding for
    `Engine.advice`.

    Of two processes that `torchrun` starts for PEARL, rank 1 drafts: there this function does not return, and the
    process exits when rank 0 does.
    """
    speculation.check_models(target)
    if not isinstance(placement, Placement):
        raise ValueError(f"placement={one_line(placement)}: use a Placement, such as Placement(draft_cpus=(1,))")
    placement.check(speculation.gamma)
    if placement.target_stages is not None:
        runtime = replace(runtime, device=placement.target_stages[-1].device)
    runtime = runtime_on(settled(runtime, target), placement)
    runtime = fitted(runtime, target, speculation, placement)
    if max(speculation.k, speculation.nodes) >= runtime.width:
        runtime = replace(runtime, width=speculation.pass_width)
    ranks = 1
    if placement.tensor_parallel:
        ranks = tensor_parallel_ranks(speculation, placement)
        if runtime.device == "cuda":
            runtime = replace(runtime, device=f"cuda:{os.environ['LOCAL_RANK']}")
    if speculation.gamma is not None and not placement.tensor_parallel and (world_size := launched()):
        if world_size != 2:
            raise ValueError(f"torchrun has started {world_size} processes: a target and its drafter are 2")
        rank, channel = met()
        if rank == 1:
            with on_cpus(placement.draft_cpus):
                DraftServer(channel).serve()
            raise SystemExit
        processes = [DrafterProcess(placement, channel)]
    else:
        processes = drafter_processes(speculation, placement)  # they start while the target loads
    with on_cpus(placement.target_cpus):
        loaded_target = load_target(target, runtime, placement.target_stages or (), ranks)
        drafter = load_drafter_in(processes, speculation, loaded_target, runtime)
        return Engine(
            loaded_target,
            drafter,
            speculation,
            kept_rows=kept_rows,
            cpus=placement.target_cpus,
            tries_plain=tries_plain,
        )


def tensor_parallel_ranks(speculation: Speculation, placement: Placement) -> int:
    """Number of tensor-parallel processes; raises ValueError for settings that would make them draft differently."""
    if (ranks := launched()) < 2:
        raise ValueError("tensor_parallel: start two or more processes by torchrun --nproc-per-node")
    if placement.has_process or placement.target_stages is not None:
        raise ValueError("tensor_parallel: each process has its whole drafter, so leave stages and draft places out")
    if speculation.gamma == "auto" or speculation.lengths == "expected":
        raise ValueError("tensor_parallel: each process would time itself and draft otherwise: set gamma or k")
    return ranks


def runtime_on(runtime: Runtime, placement: Placement) -> Runtime:
    """Runtime of the target on the device of its logits; raises ValueError if a device cannot be used."""
    for device in (*(stage.device for stage in reversed(placement.target_stages or ())), placement.draft_device):
        if device is not None:
            replace(runtime, device=device)  # raises ValueError
    stages = placement.target_stages
    return runtime if stages is None else replace(runtime, device=stages[-1].device)


def drafter_processes(speculation: Speculation, placement: Placement) -> list[DrafterProcess]:
    """Starts the drafter's processes: none if it drafts in this one, two if they draft in turn."""
    if placement.has_process:
        return [DrafterProcess(placement)]
    stages = placement.target_stages
    if stages is None or speculation.gamma is None:
        return []
    takes_turns = drafter_class(speculation.drafter).traits.drafts_one_by_one and len(stages) > 1
    return [
        DrafterProcess(replace(placement, draft_device=stage.device, draft_cpus=stage.cpus))
        for stage in ((stages[-1], stages[0]) if takes_turns else (stages[-1],))
    ]


def load_drafter_in(
    processes: Sequence[DrafterProcess], speculation: Speculation, target: Target, runtime: Runtime
) -> Drafter:
    """Loads a drafter into `processes`, or into this process if there are none."""
    copies: list[Drafter] = []
    try:
        for process in processes:
            device = process.placement.draft_device
            placed = runtime if device is None else replace(runtime, device=device)
            copies.append(process.load(speculation.drafter, target.facts, draft=speculation.draft, runtime=placed))
    except BaseException:
        for process in processes:
            process.close()
        raise
    if not copies:
        return load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=runtime)
    return copies[0] if len(copies) == 1 else CoLocatedDrafter(*copies)

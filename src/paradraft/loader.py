"""Loads a target with its drafter, each where it is to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from paradraft.core import Drafter
from paradraft.decode.channel import is_launched, met
from paradraft.decode.drafter_process import Server
from paradraft.decode.remote import DrafterProcess
from paradraft.drafters import load_drafter
from paradraft.engine import Engine
from paradraft.errors import one_line
from paradraft.models.loading import load_target
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.placement import Placement, on_cpus
from paradraft.speculation import Speculation
from paradraft.tree import Tree

CPU = Runtime()
HERE = Placement()


def load(
    target: str,
    *,
    drafter: str = "none",
    draft: str | None = None,
    k: int = 8,
    verify: str = "match",
    tree: Tree | int | None = None,
    lengths: str = "fixed",
    gamma: int | Literal["auto"] | None = None,
    kept_rows: int = 0,
    runtime: Runtime = CPU,
    placement: Placement = HERE,
) -> Engine:
    """Loads a target and a drafter.

    Args:
        target: a Hugging Face id, a folder, or "pocket".
        drafter: one of `drafter_names()`, with settings if wanted, such as "ngram:max_ngram=5"; "none" decodes plainly.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round, one after the other, at least 1.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same
            distribution and accepts more when sampling; "typical" is not lossless.
        tree: let drafts branch: a `Tree`, or a number of nodes to grow to. None drafts chains.
        lengths: how many of the k tokens to draft: "fixed" all, "heuristic" more after success,
            "confidence" while the drafter is sure, "expected" what pays on this machine.
        gamma: draft while the target verifies (PEARL), this many tokens ahead; "auto": as many as are fastest here.
        kept_rows: of how many answers, the last ones, the caches are kept: a prompt that begins with such an answer and
            its prompt, as the next turn of a conversation does, is read from its end on.
        runtime: device, dtype, compilation.
        placement: with `gamma`, where each side computes; by default both in this process.

    Raises:
        ValueError: a name or setting is unknown, or the draft does not fit the target.
    """
    shape = tree if tree is None or isinstance(tree, Tree) else Tree(budget=tree)
    speculation = Speculation(
        drafter=drafter, draft=draft, k=k, verify=verify, tree=shape, lengths=lengths, gamma=gamma
    )
    return load_engine(target, speculation, kept_rows=kept_rows, runtime=runtime, placement=placement)


def load_engine(
    target: str, speculation: Speculation, *, kept_rows: int = 0, runtime: Runtime = CPU, placement: Placement = HERE
) -> Engine:
    """Loads a target and a drafter, as `load` does, from settings that are together already.

    Of two processes that `torchrun` has started for drafting ahead, the second one drafts: there this does not return,
    and the process ends when the other one does.

    Raises:
        ValueError: see `load`.
    """
    speculation.check_models(target)
    if not isinstance(runtime, Runtime):
        raise ValueError(f"runtime={one_line(runtime)}: use a Runtime, such as Runtime(dtype='bfloat16')")
    if not isinstance(placement, Placement):
        raise ValueError(f"placement={one_line(placement)}: use a Placement, such as Placement(draft_cpus=(1,))")
    placement.check(speculation.gamma)
    if max(speculation.k, speculation.nodes) >= runtime.width:
        runtime = replace(runtime, width=speculation.pass_width)
    draft_runtime = runtime_of_draft(runtime, placement)
    process = None
    if speculation.gamma is not None and is_launched():
        rank, channel = met()
        if rank == 1:
            with on_cpus(placement.draft_cpus):
                Server(channel).serve()
            raise SystemExit
        process = DrafterProcess(placement, channel)
    elif placement.has_process:
        process = DrafterProcess(placement)  # it begins while the target is loaded
    with on_cpus(placement.target_cpus):
        loaded = load_target(target, runtime)
        drafter = load_drafter_in(process, speculation, loaded, draft_runtime)
        return Engine(loaded, drafter, speculation, kept_rows=kept_rows, cpus=placement.target_cpus)


def runtime_of_draft(runtime: Runtime, placement: Placement) -> Runtime:
    """The target's, on the device of the drafter.

    Raises:
        ValueError: there is no such device.
    """
    return runtime if placement.draft_device is None else replace(runtime, device=placement.draft_device)


def load_drafter_in(
    process: DrafterProcess | None, speculation: Speculation, target: Target, runtime: Runtime
) -> Drafter:
    """Loads a drafter.

    Args:
        process: that is to have it; None for this one.
        speculation: names it.
        target: whose text is to be guessed.
        runtime: the drafter's.

    Raises:
        ValueError: it cannot be loaded.
    """
    if process is None:
        return load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=runtime)
    return process.load(speculation.drafter, target.facts, draft=speculation.draft, runtime=runtime)

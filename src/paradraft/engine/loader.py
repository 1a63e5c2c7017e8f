"""Plans how a target and its drafter are loaded, checks the plan before weights are read, and loads them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from paradraft.core import Drafter
from paradraft.decode.pearl.channel import launched, met
from paradraft.decode.pearl.drafter_process import DraftServer
from paradraft.decode.pearl.pearl_colocated import CoLocatedDrafter
from paradraft.decode.pearl.remote import DrafterProcess
from paradraft.drafters import drafter_class, load_drafter, part_names, takes_draft
from paradraft.drafters.parts.draft_loading import OR_TRANSLATE, check_draft_config
from paradraft.engine.automatic import automatic, where_lengths_adapt
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.errors import OtherTokensError, one_line
from paradraft.formats.gguf import is_gguf
from paradraft.formats.head import TargetIdentity, read_identity
from paradraft.models.architectures import context_of
from paradraft.models.config_check import check_capacity
from paradraft.models.kv_cache import free_bytes
from paradraft.models.names import POCKET, is_shape
from paradraft.models.runtime import AUTO, QUANTIZED, STORED, Runtime
from paradraft.models.target import Target
from paradraft.placement import Placement, on_cpus
from paradraft.sources.load_plan import BY_MODEL, HERE, Checkpoint, LoadPlan, chosen, draft_plan, settled, width_for
from paradraft.sources.loading import locate, room, tokenizer_for, tokens_of
from paradraft.sources.target_loading import load_planned, weights_bytes
from paradraft.tree import Tree


def load(
    target: str,
    *,
    drafter: str = AUTO,
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
        drafter: one of `drafter_names()` or several, with settings, as in "ngram:max_ngram=5+pard"; "none" for plain;
            "auto": one that fits `draft`, else the last one trained for the target, else one without a model where
            draft lengths can adapt.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round (depth of the draft), at least 1.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same
            distribution and accepts more when sampling, "block" again more; "typical" and "judge:head=FILE" are
            not lossless.
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
    runtime = chosen(runtime, device=device, dtype=dtype)
    return load_engine(target, speculation, kept_rows=kept_rows, runtime=runtime, placement=placement)


def load_engine(
    target: str,
    speculation: Speculation,
    *,
    kept_rows: int = 0,
    runtime: Runtime = BY_MODEL,
    placement: Placement = HERE,
    tries_plain: bool = False,
    has_grammars: bool = False,
) -> Engine:
    """`load` with its settings in a `Speculation`, and the same errors.

    With `tries_plain` a few rounds draft nothing, where that changes no text, to time plain decoding for
    `Engine.advice`. `has_grammars`: see `automatic`.

    Of two processes that `torchrun` starts for PEARL, rank 1 drafts: there this function does not return, and the
    process exits when rank 0 does.
    """
    if speculation.drafter == AUTO:
        speculation = automatic(target, speculation, has_grammars=has_grammars, tokenizer=runtime.tokenizer)
    plan = plan_engine(target, speculation, runtime, placement)
    return load_as_planned(plan, speculation, kept_rows=kept_rows, tries_plain=tries_plain)


def plan_engine(
    target: str, speculation: Speculation, runtime: Runtime = BY_MODEL, placement: Placement = HERE
) -> LoadPlan:
    """The first half of `load_engine`: plans and checks, and loads nothing."""
    speculation.check_models(target)
    if not isinstance(placement, Placement):
        raise ValueError(f"placement={one_line(placement)}: use a Placement, such as Placement(draft_cpus=(1,))")
    placement.check(speculation.gamma)
    plan = resolve(Checkpoint.find(target), [speculation], runtime, placement)
    check_memory(plan)
    return plan


def load_as_planned(
    plan: LoadPlan, speculation: Speculation, *, kept_rows: int = 0, tries_plain: bool = False
) -> Engine:
    """The second half of `load_engine`."""
    placement = plan.placement
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
        target = load_planned(plan)
        speculation = where_lengths_adapt(speculation, is_exact=target.lm.is_native)
        drafter = load_drafter_in(processes, speculation, target, plan)
        return Engine(
            target,
            drafter,
            speculation,
            kept_rows=kept_rows,
            cpus=placement.target_cpus,
            tries_plain=tries_plain,
            loads=None
            if processes
            else lambda draft: load_drafter(speculation.drafter, target, draft=draft, runtime=plan.runtime),
        )


def resolve(
    target: Checkpoint,
    speculations: Sequence[Speculation],
    runtime: Runtime = BY_MODEL,
    placement: Placement = HERE,
    *,
    dtype: str | None = None,
) -> LoadPlan:
    """Settles how a target is loaded, and checks from config files that its drafters fit it.

    The device is that of the last stage, or of this process among those of `torchrun`; passes are as wide as the widest
    draft needs; a runtime without capacity gets that of a draft model with a smaller context.

    Args:
        speculations: all that the target decodes with.
        dtype: instead of the runtime's.

    Raises:
        ValueError: a device or a dtype cannot be used, the capacity exceeds the model, or a draft model has another
            vocabulary, a smaller context or was trained for another target.
    """
    stages = placement.target_stages
    settings: dict[str, Any] = {"device": stages[-1].device if stages else None, "dtype": dtype}
    plan = LoadPlan(checkpoint=target, runtime=settled(target, runtime, **settings), placement=placement)
    for device in (*(stage.device for stage in reversed(stages or ())), placement.draft_device):
        plan.runtime_on(device)  # raises ValueError
    check_capacity(runtime.capacity, context_of(target.config))
    settings["capacity"], drafts = runtime.capacity, []
    for drafter, draft in dict.fromkeys((each.drafter, each.draft) for each in speculations):
        if (model := _draft_model(target, drafter, draft)) is not None:
            if not drafter_class(drafter).traits.has_own_tokens:
                settings["capacity"] = _capacity_with(model, plan, settings["capacity"])
            drafts.append(draft_plan(model, plan.runtime, device=placement.draft_device))
    if placement.tensor_parallel:
        ranks = max(tensor_parallel_ranks(each, placement) for each in speculations)
        if plan.runtime.device == "cuda":
            settings["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
    else:
        ranks = 1
    width = width_for(
        runtime,
        drafted=max(max(each.k, each.nodes) for each in speculations),
        needed=max(each.pass_width for each in speculations),
    )
    return LoadPlan(
        checkpoint=target,
        runtime=settled(target, runtime, **settings, width=width),
        placement=placement,
        ranks=ranks,
        drafts=tuple(drafts),
    )


def _draft_model(target: Checkpoint, drafter: str, draft: str | None) -> Checkpoint | None:
    """The draft model of a drafter that has one with a vocabulary; None for the shipped one, which fits."""
    if draft is None or draft == POCKET:
        return None
    name = next(part for part in part_names(drafter) if takes_draft(part))
    folder = locate(draft, name)
    identity = None if is_shape(folder) or is_gguf(folder) else read_identity(folder, name)
    if identity is not None:
        # The weights' digest is compared when they are read.
        identity.check(TargetIdentity.of(target.config, reads_weights=False), folder)
        return None
    traits = drafter_class(name).traits
    return Checkpoint.at(folder) if traits.can_run_ahead or traits.has_own_tokens else None


def _capacity_with(draft: Checkpoint, plan: LoadPlan, capacity: int | None) -> int | None:
    """The capacity beside a draft model; raises ValueError if the draft does not fit the target."""
    config = plan.checkpoint.config
    vocab_size = config.vocab_size
    if draft.config.vocab_size < vocab_size:  # the target's last rows may be padding
        vocab_size = tokens_of(config, tokenizer_for(plan.checkpoint.folder, plan.runtime.tokenizer, config))
    if capacity is None and context_of(draft.config) < context_of(config):
        capacity = context_of(draft.config)
    try:
        check_draft_config(draft.folder, draft.config, vocab_size=vocab_size, capacity=room(config, capacity))
    except OtherTokensError as error:
        raise ValueError(f"{error}, {OR_TRANSLATE}") from None
    return capacity


def check_memory(plan: LoadPlan) -> None:
    """Raises ValueError unless target and draft fit into free memory; layers on several devices are not checked."""
    if plan.placement.target_stages is not None or plan.placement.tensor_parallel:
        return
    needed: dict[torch.device, list[tuple[str, str, float]]] = defaultdict(list)
    for each in (plan, *plan.drafts):
        runtime = each.runtime
        dtype = runtime.dtype if runtime.dtype in (*QUANTIZED, STORED) else str(runtime.computed_in)
        needed[torch.device(runtime.device)].append(
            (each.checkpoint.folder, dtype.removeprefix("torch."), weights_bytes(each))
        )
    for device, models in needed.items():
        if sum(size for *_, size in models) > (free := free_bytes(device)):
            listed = " and ".join(f"{size / 2**30:.1f} GiB of {name!r} in {dtype}" for name, dtype, size in models)
            raise ValueError(
                f"weights, {listed}, do not fit into the {free / 2**30:.1f} GiB that are free on {device}: "
                "use smaller models, or another device"
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
    processes: Sequence[DrafterProcess], speculation: Speculation, target: Target, plan: LoadPlan
) -> Drafter:
    """Loads a drafter into `processes`, or into this process if there are none."""
    copies: list[Drafter] = []
    try:
        for process in processes:
            runtime = plan.runtime_on(process.placement.draft_device)
            copies.append(process.load(speculation.drafter, target.facts, draft=speculation.draft, runtime=runtime))
    except BaseException:
        for process in processes:
            process.close()
        raise
    if not copies:
        return load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=plan.runtime)
    return copies[0] if len(copies) == 1 else CoLocatedDrafter(*copies)

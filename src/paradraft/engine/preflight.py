"""Whether a target and its drafter can run together, by their config files, before any weights are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from paradraft.drafters import drafter_class, split_settings
from paradraft.drafters.parts.draft_loading import check_draft_config, draft_runtime
from paradraft.engine.speculation import Speculation
from paradraft.formats.gguf import is_gguf
from paradraft.formats.head import TargetIdentity, read_identity
from paradraft.models.architecture import check_capacity, context_of
from paradraft.models.kv_cache import free_bytes
from paradraft.models.names import POCKET, is_shape
from paradraft.models.runtime import QUANTIZED, STORED, Runtime
from paradraft.placement import Placement
from paradraft.sources.loading import config_of, locate, room, tokenizer_for, tokens_of
from paradraft.sources.target_loading import weights_bytes


def fitted(runtime: Runtime, target: str, speculation: Speculation, placement: Placement) -> Runtime:
    """How a target and its drafter run together.

    Args:
        runtime: as it was asked for, without "auto".
        target: name of the model.
        speculation: names the drafter.
        placement: where both are.

    Returns:
        The same, but for the capacity: where none was asked for, and the draft model has less room than the target,
        its own.

    Raises:
        ValueError: there is no such capacity, the draft model has other tokens or less room than the target or was
            trained for another one, or the weights do not fit into memory.
    """
    folder = locate(target, "target")
    config = config_of(folder)
    check_capacity(runtime.capacity, context_of(config))
    loaded = [(folder, runtime)]
    draft = speculation.draft
    if draft is not None and draft != POCKET:
        name, _ = split_settings(speculation.drafter)
        draft = locate(draft, name)
        identity = None if is_shape(draft) or is_gguf(draft) else read_identity(draft, name)
        if identity is not None:
            # What the weights are is found when they are read.
            identity.check(TargetIdentity.of(config, reads_weights=False), draft)
        elif drafter_class(speculation.drafter).can_run_ahead:
            runtime = _fitted_to_draft(runtime, folder, config, draft)
            of_draft = draft_runtime(draft, runtime)
            loaded.append((draft, replace(of_draft, device=placement.draft_device or runtime.device)))
    if placement.target_stages is None and not placement.tensor_parallel:
        check_memory(loaded)
    return runtime


def _fitted_to_draft(runtime: Runtime, target: str, config: PretrainedConfig, draft: str) -> Runtime:
    found = config_of(draft)
    needed = config.vocab_size
    if found.vocab_size < needed:  # it may be that the target's last rows are no tokens
        needed = tokens_of(config, tokenizer_for(target, runtime.tokenizer))
    if runtime.capacity is None and context_of(found) < context_of(config):
        runtime = replace(runtime, capacity=context_of(found))
    check_draft_config(draft, found, vocab_size=needed, capacity=room(config, runtime.capacity))
    return runtime


def check_memory(loaded: Sequence[tuple[str, Runtime]]) -> None:
    """Checks that weights fit into the memory that is free.

    Args:
        loaded: the models, by their folders, and how and where each of them runs.

    Raises:
        ValueError: they do not.
    """
    needed: dict[torch.device, list[tuple[str, str, float]]] = defaultdict(list)
    for folder, runtime in loaded:
        dtype = runtime.dtype if runtime.dtype in (*QUANTIZED, STORED) else str(runtime.computed_in)
        size = weights_bytes(folder, runtime)
        needed[torch.device(runtime.device)].append((folder, dtype.removeprefix("torch."), size))
    for place, of in needed.items():
        if sum(size for *_, size in of) > (free := free_bytes(place)):
            listed = " and ".join(f"{size / 2**30:.1f} GiB of {name!r} in {dtype}" for name, dtype, size in of)
            raise ValueError(
                f"weights, {listed}, do not fit into the {free / 2**30:.1f} GiB that are free on {place}: "
                "use smaller models, or another device"
            )

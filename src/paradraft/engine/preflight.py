"""Checks that target and draft fit together and into memory, from config files, before weights are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from paradraft.drafters import drafter_class, part_names, takes_draft
from paradraft.drafters.parts.draft_loading import check_draft_config, draft_runtime
from paradraft.engine.speculation import Speculation
from paradraft.formats.gguf import is_gguf
from paradraft.formats.head import TargetIdentity, read_identity
from paradraft.models.architectures import context_of
from paradraft.models.config_check import check_capacity
from paradraft.models.kv_cache import free_bytes
from paradraft.models.names import POCKET, is_shape
from paradraft.models.runtime import QUANTIZED, STORED, Runtime
from paradraft.placement import Placement
from paradraft.sources.loading import config_of, locate, room, tokenizer_for, tokens_of
from paradraft.sources.target_loading import weights_bytes


def fitted(runtime: Runtime, target: str, speculation: Speculation, placement: Placement) -> Runtime:
    """Checks a target against its drafter; a `runtime` without capacity gets the draft model's context if smaller.

    Raises:
        ValueError: the capacity exceeds the model, the draft model has another vocabulary, a smaller context or was
            trained for another target, or the weights do not fit into memory.
    """
    folder = locate(target, "target")
    config = config_of(folder)
    check_capacity(runtime.capacity, context_of(config))
    loaded = [(folder, runtime)]
    draft = speculation.draft
    if draft is not None and draft != POCKET:
        name = next(part for part in part_names(speculation.drafter) if takes_draft(part))
        draft = locate(draft, name)
        identity = None if is_shape(draft) or is_gguf(draft) else read_identity(draft, name)
        if identity is not None:
            # The weights' digest is compared when they are read.
            identity.check(TargetIdentity.of(config, reads_weights=False), draft)
        elif drafter_class(name).traits.can_run_ahead:
            runtime = _fitted_to_draft(runtime, folder, config, draft)
            own_runtime = draft_runtime(draft, runtime)
            loaded.append((draft, replace(own_runtime, device=placement.draft_device or runtime.device)))
    if placement.target_stages is None and not placement.tensor_parallel:
        check_memory(loaded)
    return runtime


def _fitted_to_draft(runtime: Runtime, target: str, config: PretrainedConfig, draft: str) -> Runtime:
    draft_config = config_of(draft)
    vocab_size = config.vocab_size
    if draft_config.vocab_size < vocab_size:  # the target's last rows may be padding
        vocab_size = tokens_of(config, tokenizer_for(target, runtime.tokenizer))
    if runtime.capacity is None and context_of(draft_config) < context_of(config):
        runtime = replace(runtime, capacity=context_of(draft_config))
    check_draft_config(draft, draft_config, vocab_size=vocab_size, capacity=room(config, runtime.capacity))
    return runtime


def check_memory(loaded: Sequence[tuple[str, Runtime]]) -> None:
    """Raises ValueError unless the weights fit into free memory; `loaded` has folder and runtime of each model."""
    needed: dict[torch.device, list[tuple[str, str, float]]] = defaultdict(list)
    for folder, runtime in loaded:
        dtype = runtime.dtype if runtime.dtype in (*QUANTIZED, STORED) else str(runtime.computed_in)
        size = weights_bytes(folder, runtime)
        needed[torch.device(runtime.device)].append((folder, dtype.removeprefix("torch."), size))
    for device, models in needed.items():
        if sum(size for *_, size in models) > (free := free_bytes(device)):
            listed = " and ".join(f"{size / 2**30:.1f} GiB of {name!r} in {dtype}" for name, dtype, size in models)
            raise ValueError(
                f"weights, {listed}, do not fit into the {free / 2**30:.1f} GiB that are free on {device}: "
                "use smaller models, or another device"
            )

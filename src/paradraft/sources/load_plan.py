"""Load plans: the settings that a model is loaded and run with, settled from a user's options and its checkpoint.

Only this module writes `width`, `capacity`, `device` and `dtype` of a `Runtime`; loading reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.errors import one_line
from paradraft.models.devices import device_of, fast_dtype
from paradraft.models.names import is_shape
from paradraft.models.runtime import AUTO, OF_FEW_BITS, STORED, WIDTH, Runtime
from paradraft.placement import Placement
from paradraft.sources.loading import config_of, is_in_few_bits, locate
from paradraft.sources.reduced_head import ReducedHead, reduced_head

HERE = Placement()
BY_MODEL = Runtime()


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model to load.

    Args:
        name: as the user wrote it, for messages.
        folder: its folder, file, Hugging Face id or shape.
        is_quantized: whether its weights are stored quantized: a GGUF file, or a folder of GPTQ or AWQ.
    """

    name: str
    folder: str
    config: PretrainedConfig = field(compare=False, repr=False)
    is_quantized: bool

    @cached_property
    def head(self) -> ReducedHead | None:
        """Its output head, if that has fewer rows than the embedding; raises ValueError as `reduced_head`."""
        return reduced_head(self.folder, self.config)

    @classmethod
    def find(cls, name: str, role: str = "target") -> Checkpoint:
        """Locates a model and reads its config; raises ValueError as `locate` and `config_of`."""
        return cls.at(locate(name, role), name)

    @classmethod
    def at(cls, folder: str, name: str | None = None) -> Checkpoint:
        """Reads the config of a located model; raises ValueError as `config_of`."""
        config = config_of(folder)
        return cls(name=name or folder, folder=folder, config=config, is_quantized=is_in_few_bits(folder, config))


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How a model is loaded and run. `paradraft.engine.loader.resolve` plans a target with its drafter.

    Args:
        runtime: without "auto"; its device is that of the logits.
        placement: of a target and its drafter.
        ranks: processes that share each layer, this one included (tensor parallelism).
        drafts: plans of the draft models beside it, as their drafters make them too; heads are not counted.
    """

    checkpoint: Checkpoint
    runtime: Runtime
    placement: Placement = HERE
    ranks: int = 1
    drafts: tuple[LoadPlan, ...] = ()

    def runtime_on(self, device: str | None) -> Runtime:
        """The runtime of a drafter on another device; raises ValueError if the device cannot be used."""
        return self.runtime if device is None else replace(self.runtime, device=device)


def settled(
    checkpoint: Checkpoint,
    runtime: Runtime,
    *,
    device: str | None = None,
    dtype: str | None = None,
    width: int = 0,
    capacity: int | None = None,
) -> Runtime:
    """A runtime without "auto" for a model.

    Args:
        device, dtype, capacity: instead of the runtime's.
        width: tokens of the widest pass that drafting needs.

    Raises:
        ValueError: the device or the dtype is not available for this model.
    """
    runtime = replace(
        runtime,
        device=runtime.device if device is None else device,
        dtype=runtime.dtype if dtype is None else dtype,
        width=max(runtime.width, width),
        capacity=runtime.capacity if capacity is None else capacity,
    )
    if checkpoint.is_quantized:
        return replace(runtime, device=_device_of_quantized(checkpoint, runtime), dtype=STORED)
    device, dtype = device_of(runtime.device), runtime.dtype
    if dtype in (AUTO, STORED):
        dtype = fast_dtype(_stored_dtype(checkpoint), device)
    return replace(runtime, device=device, dtype=dtype)


def chosen(runtime: Runtime, *, device: str, dtype: str) -> Runtime:
    """A runtime with a device and a dtype, which may be "auto"; raises ValueError if it has others."""
    for name, value in (("device", device), ("dtype", dtype)):
        if value != AUTO and (other := getattr(runtime, name)) not in (AUTO, value):
            raise ValueError(f"{name}={value!r}: runtime says {other!r}, give it once")
    return replace(
        runtime,
        device=runtime.device if device == AUTO else device,
        dtype=runtime.dtype if dtype == AUTO else dtype,
    )


def plan_of(name: str, runtime: Runtime = BY_MODEL) -> LoadPlan:
    """Plan of a target without a drafter.

    Raises:
        ValueError: there is no such model, or the device or dtype is not available for it.
    """
    checkpoint = Checkpoint.find(name)
    return LoadPlan(checkpoint=checkpoint, runtime=settled(checkpoint, runtime))


def draft_plan(
    draft: Checkpoint, runtime: Runtime, *, device: str | None = None, width: int = 0, capacity: int | None = None
) -> LoadPlan:
    """Plan of a draft model.

    Args:
        runtime: of its target.
        device, width, capacity: see `settled`.

    Raises:
        ValueError: the device or the draft's dtype is not available for it.
    """
    dtype = runtime.draft_dtype or _default_draft_dtype(draft, runtime, device)
    return LoadPlan(
        checkpoint=draft, runtime=settled(draft, runtime, device=device, dtype=dtype, width=width, capacity=capacity)
    )


def shared(runtime: Runtime, plans: Sequence[LoadPlan]) -> Runtime:
    """A runtime with the largest width of the plans and their smallest capacity."""
    capacities = [plan.runtime.capacity for plan in plans if plan.runtime.capacity is not None]
    width = max(plan.runtime.width for plan in plans)
    return replace(runtime, width=width, capacity=min(capacities, default=None))


def runtime_of(model: PreTrainedModel, *, width: int) -> Runtime:
    """The runtime of a model that is loaded already, with passes of `width` tokens."""
    return Runtime(device=str(model.device), dtype=str(model.dtype).removeprefix("torch."), width=width)


def wider(runtime: Runtime, tokens: int) -> Runtime:
    """A runtime whose passes have room for further tokens."""
    return replace(runtime, width=runtime.width + tokens)


def width_for(runtime: Runtime, *, drafted: int, needed: int) -> int:
    """Tokens of the widest pass: `needed`, unless a narrower one was chosen that `drafted` tokens and a root fit into.

    >>> width_for(Runtime(), drafted=8, needed=64), width_for(Runtime(width=24), drafted=8, needed=64)
    (64, 24)
    >>> width_for(Runtime(width=24), drafted=30, needed=64), width_for(Runtime(), drafted=40, needed=82)
    (64, 82)
    """
    return runtime.width if drafted < runtime.width < WIDTH else max(runtime.width, needed)


def _default_draft_dtype(draft: Checkpoint, runtime: Runtime, device: str | None) -> str | None:
    if draft.is_quantized:
        return STORED
    is_on_cpu = torch.device(device_of(device or runtime.device)).type == "cpu"
    return OF_FEW_BITS if runtime.dtype == STORED and is_on_cpu else None


def _device_of_quantized(checkpoint: Checkpoint, runtime: Runtime) -> str:
    if runtime.dtype not in (AUTO, STORED):
        raise ValueError(
            f"dtype={runtime.dtype!r}: the weights of {checkpoint.name!r} are stored in few bits, and decoded as they "
            "are: leave the dtype out, or use the model before that"
        )
    device = "cpu" if runtime.device == AUTO else device_of(runtime.device)
    if torch.device(device).type != "cpu":
        raise ValueError(
            f"device={device!r}: the weights of {checkpoint.name!r} are stored in few bits, which run on CPUs: use cpu"
        )
    return device


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    stored = None if is_shape(checkpoint.folder) else checkpoint.config.dtype
    dtype = getattr(torch, stored, stored) if isinstance(stored, str) else stored
    if not isinstance(dtype, torch.dtype | None):
        raise ValueError(
            f"{checkpoint.name!r} has dtype {one_line(dtype)} in its config.json, which PyTorch does not have: write "
            'one such as "bfloat16", or give another dtype than auto'
        )
    return dtype

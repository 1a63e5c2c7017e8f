"""Choice of the forward pass: C++ where it supports the model and passes its self-check, else torch."""

from __future__ import annotations

import time
import warnings

import torch
from transformers import PreTrainedModel

from paradraft.models.forward import Forward
from paradraft.models.forward.compiled import CompiledPass
from paradraft.models.forward.cpu.build import CannotBuildError
from paradraft.models.forward.cpu.matrix import WrongPassError, compute_products
from paradraft.models.forward.cpu.model import NativePass, can_serve
from paradraft.models.forward.eager import EagerPass
from paradraft.models.quantized import QuantizedTensor, keep_parts


def chosen(
    model: PreTrainedModel,
    *,
    compiled: bool | None,
    cuda_graphs: bool,
    pad_to: int,
    probe: str | None,
    refusals: list[str],
) -> Forward:
    """The forward pass of a model; see `CausalLM` for the arguments.

    A warning that a pass in C++ was refused is also appended to `refusals`. Raises OtherLogitsError.
    """
    wrong: WrongPassError | None = None
    reason: str | None = None
    if compiled is not False and can_serve(model):
        try:
            return NativePass(model, probe=probe)
        except CannotBuildError as error:
            reason = f"no passes in C++, which are several times as fast: {error}"
        except WrongPassError as error:
            wrong = error
    try:
        compute_products(model)
    except CannotBuildError:  # torch computes them then
        keep_parts(model)
    if wrong is not None:
        reason = _refusal(model, wrong)
    if reason is not None:
        refusals.append(reason)
        warnings.warn(reason, stacklevel=3)
    kind = CompiledPass if compiled else EagerPass
    return kind(model, pad_to=pad_to, cuda_graphs=cuda_graphs)


@torch.no_grad()
def _refusal(model: PreTrainedModel, wrong: WrongPassError) -> str:
    """The warning that a model's pass in C++ failed its self-check."""
    times = "many times"
    if wrong.seconds is not None:
        token = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        model(token, use_cache=False)  # the first pass takes longer than others
        start = time.perf_counter()
        model(token, use_cache=False)
        times = f"about {(time.perf_counter() - start) / wrong.seconds:.2g} times"
    if (damaged := _not_finite(model)) is not None:
        return (
            f"model {model.config.name_or_path!r} has infinite numbers or NaN in {damaged}: it is damaged, or its "
            f"training diverged; PyTorch is used, {times} slower"
        )
    return (
        f"the C++ pass failed its self-check on this model ({wrong}), PyTorch is used, {times} slower; the text is "
        "still the model's own; please report this"
    )


def _not_finite(model: PreTrainedModel) -> str | None:
    """The name of a weight with NaN or infinity."""
    for name, weight in model.named_parameters():
        parts = weight.parts[1:] if isinstance(weight, QuantizedTensor) else [weight]
        if not all(part.float().isfinite().all() for part in parts if part is not None):
            return name
    return None

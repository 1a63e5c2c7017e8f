"""Loads targets, and causal LMs with their KV caches, in the requested precision and on the requested devices.

Quantized weights on a CPU come from the packed file that an earlier load has written, or are read and rounded one
matrix at a time, so that the checkpoint is never in memory as a whole.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.formats.gguf import is_gguf, read_gguf
from paradraft.models.architectures import spec_of
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.build import is_built
from paradraft.models.forward.cpu.model import can_serve
from paradraft.models.forward.cpu.self_check import OtherLogitsError
from paradraft.models.forward.pipeline import StageModel, split
from paradraft.models.names import is_shape
from paradraft.models.quantization import bits_of, quantize
from paradraft.models.quantized import GROUP
from paradraft.models.runtime import QUANTIZED, STORED, Runtime
from paradraft.models.target import Target, TargetFacts
from paradraft.sources import gguf_model
from paradraft.sources.gguf_tokenizer import named_ends_of
from paradraft.sources.load_plan import BY_MODEL, Checkpoint, LoadPlan, plan_of
from paradraft.sources.loading import (
    load_generation_config,
    load_model,
    load_shard,
    load_skeleton,
    room,
    tokenizer_for,
    tokens_of,
)
from paradraft.sources.packed_file import PackedFile
from paradraft.sources.presets import random_model
from paradraft.sources.reduced_head import set_head
from paradraft.sources.rounding_reader import files_of, fill
from paradraft.text.generation_config import PenaltyWarning, complaint, end_ids, penalty_complaint, suppressed_ids

LOG = logging.getLogger(__name__)


def load_target(name: str, runtime: Runtime = BY_MODEL) -> Target:
    """Loads a target for no particular drafter; see `load_planned`."""
    return load_planned(plan_of(name, runtime))


def load_planned(plan: LoadPlan) -> Target:
    """Loads a target and its tokenizer.

    Raises:
        ValueError: it cannot run like this.
    """
    checkpoint, runtime, stages = plan.checkpoint, plan.runtime, plan.placement.target_stages
    name, folder = checkpoint.name, checkpoint.folder
    tokenizer = tokenizer_for(folder, runtime.tokenizer, checkpoint.config)
    vocab_size = tokens_of(checkpoint.config, tokenizer)
    if plan.ranks > 1:
        lm = _causal_lm(load_shard(folder, runtime, checkpoint.config, plan.ranks), vocab_size, plan, ranks=plan.ranks)
    elif stages:
        if runtime.dtype == STORED:
            raise ValueError(
                f"{name!r}: layers of weights that are stored in few bits are on one CPU: leave stages out"
            )
        model = _weights(checkpoint, Runtime(device="cpu", dtype=str(runtime.computed_in).removeprefix("torch.")))
        parts = split(model, stages)
        for part in parts:
            _quantize(part.model, runtime)
        lm = _causal_lm(model, vocab_size, plan, stages=parts)
    else:
        lm = load_lm(plan, vocab_size)
    target = Target(lm, tokenizer, _named_ends(folder, lm.model, tokenizer))
    _apply_generation_config(lm.model, target, name)
    return target


def facts_of(target: Checkpoint, named: str | None = None, *, capacity: int = 0) -> TargetFacts:
    """What a draft model must fit of a target, without its weights.

    Args:
        named: see `tokenizer_for`.
        capacity: 0 fits all.
    """
    tokenizer = tokenizer_for(target.folder, named, target.config)
    return TargetFacts(
        tokenizer=tokenizer, vocab_size=tokens_of(target.config, tokenizer), capacity=capacity,
        eos_ids=end_ids(load_generation_config(target.folder, target.config)),
    )  # fmt: skip


def _named_ends(folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end tokens that a model's files name, without those known only from a GGUF file's vocabulary."""
    if is_gguf(folder):
        return frozenset(named_ends_of(read_gguf(folder)))
    return end_ids(model.generation_config) | {tokenizer.eos_token_id} - {None}


def _apply_generation_config(model: PreTrainedModel, target: Target, name: str) -> None:
    """Applies a model's generation config to the target, and warns of settings that are ignored."""
    config = model.generation_config
    target.lm.forbid(suppressed_ids(config))
    if (ignored := complaint(config)) is not None:
        warnings.warn(f"{name}: {ignored}", stacklevel=3)
    if unknown := sorted(token for token in end_ids(config) if not 0 <= token < target.lm.vocab_size):
        warnings.warn(
            f"{name}: its eos_token_id {unknown[0]} is not among its {target.lm.vocab_size} tokens, so it ends no "
            "text: correct its generation_config.json",
            stacklevel=3,
        )
    if (penalty := penalty_complaint(config)) is not None:
        warnings.warn(f"{name}: {penalty}", PenaltyWarning, stacklevel=3)
    if not end_ids(config) and model.config.eos_token_id not in (None, []):
        warnings.warn(
            f"{name}: its generation_config.json names no eos_token_id, so its texts end at their limit only, as with "
            f"generate; its config.json names {model.config.eos_token_id}",
            stacklevel=3,
        )


def load_lm(plan: LoadPlan, vocab_size: int) -> CausalLM:
    """Loads a causal LM with its KV cache; quantized weights on a CPU from the packed file of an earlier load.

    Args:
        vocab_size: number of ids that are tokens.

    Raises:
        ValueError: it cannot run like this.
    """
    checkpoint, runtime = plan.checkpoint, plan.runtime
    LOG.info("%s: reading", Path(checkpoint.folder).name)
    file = None
    if _packs_few_bits(plan):
        file = PackedFile.of(checkpoint.folder, checkpoint.config, dtype=runtime.dtype, computed_in=runtime.computed_in)
    if file is not None and (probe := file.read(model := _skeleton(plan))) is not None:
        with suppress(OtherLogitsError):
            return _causal_lm(model, vocab_size, plan, probe=probe)
        file.warn_of_other_logits()
    lm = _causal_lm(_loaded(plan), vocab_size, plan)
    if file is not None and lm.probe is not None:
        file.write(lm.model, lm.probe)
    return lm


def _packs_few_bits(plan: LoadPlan) -> bool:
    """Whether a model may run in C++ with quantized weights."""
    runtime, spec = plan.runtime, spec_of(plan.checkpoint.config)
    is_on_cpu, has_few_bits = torch.device(runtime.device).type == "cpu", runtime.dtype in (*QUANTIZED, STORED)
    return has_few_bits and is_on_cpu and runtime.compiled is not False and not spec.has_experts


def _skeleton(plan: LoadPlan) -> PreTrainedModel:
    """A model on the meta device with its generation config."""
    folder, config = plan.checkpoint.folder, plan.checkpoint.config
    model = load_skeleton(folder, plan.runtime.computed_in, config)
    set_head(model, plan.checkpoint.head)
    if not is_shape(folder):
        model.generation_config = load_generation_config(folder, config)
    return model


def _rounded_when_packed(plan: LoadPlan) -> PreTrainedModel | None:
    """A model whose weights are read and rounded when its C++ pass packs them; None if that is not possible."""
    if (pieces := _read_in_pieces(plan)) is None:
        return None
    model, files = pieces
    fill(model, files, bits=QUANTIZED[plan.runtime.dtype])
    return model if can_serve(model) else None


def _read_in_pieces(plan: LoadPlan) -> tuple[PreTrainedModel, dict[str, Path]] | None:
    """A model on the meta device, and the file of each weight; None if they are not rounded matrix by matrix."""
    folder = plan.checkpoint.folder
    if is_shape(folder) or plan.runtime.dtype not in QUANTIZED or not _packs_few_bits(plan) or not is_built():
        return None
    model = _skeleton(plan)
    if not spec_of(model.config).is_in_cpp or (files := files_of(folder, model)) is None:
        return None
    return model, files


def _loaded(plan: LoadPlan) -> PreTrainedModel:
    if (model := _rounded_when_packed(plan)) is not None:
        return model
    model = _weights(plan.checkpoint, plan.runtime)
    _quantize(model, plan.runtime)
    return model


def _weights(checkpoint: Checkpoint, runtime: Runtime) -> PreTrainedModel:
    if is_shape(checkpoint.folder):
        return random_model(checkpoint.folder, dtype=runtime.computed_in, device=runtime.device)
    return load_model(checkpoint.folder, runtime, checkpoint.config, head=checkpoint.head)


def _quantize(model: PreTrainedModel, runtime: Runtime) -> None:
    if runtime.dtype in QUANTIZED:
        quantize(model, QUANTIZED[runtime.dtype])


def _causal_lm(
    model: PreTrainedModel,
    vocab_size: int,
    plan: LoadPlan,
    *,
    stages: Sequence[StageModel] = (),
    ranks: int = 1,
    probe: str | None = None,
) -> CausalLM:
    """A loaded model with its KV cache; `probe` is of its C++ pass when its weights were packed, see `CausalLM`."""
    runtime, head = plan.runtime, plan.checkpoint.head
    return CausalLM(
        model,
        vocab_size=vocab_size,
        capacity=room(model.config, runtime.capacity),
        width=runtime.width,
        compiled=runtime.compiled,
        pad_to=runtime.pad_to,
        cuda_graphs=runtime.cuda_graphs,
        stages=stages,
        ranks=ranks,
        probe=probe,
        vocab_map=None if head is None else head.vocab_map,
    )


def weights_bytes(plan: LoadPlan) -> float:
    """Bytes of memory for a model's weights while it is loaded.

    Rounded weights count with their few bits if they are read one matrix at a time, because later loads map the same
    amount; if they are read as a whole, they count at full precision.

    Raises:
        ValueError: it is no supported causal LM.
    """
    checkpoint, itemsize = plan.checkpoint, plan.runtime.computed_in.itemsize
    if is_gguf(checkpoint.folder):
        return gguf_model.resident_bytes(read_gguf(checkpoint.folder), itemsize)
    if (pieces := _read_in_pieces(plan)) is not None:
        return _rounded_bytes(pieces[0], QUANTIZED[plan.runtime.dtype])
    set_head(model := load_skeleton(checkpoint.folder, config=checkpoint.config), checkpoint.head)
    numbers = sum(weight.numel() for weight in model.parameters())
    if not checkpoint.is_quantized:
        return numbers * float(itemsize)
    packed = sum(layer.weight.numel() for layer in model.model.layers.modules() if isinstance(layer, nn.Linear))
    return packed * 1.25 + (numbers - packed) * float(itemsize)  # a byte for each value, and scales


def _rounded_bytes(model: PreTrainedModel, bits: int) -> float:
    """Bytes of a model that is rounded one matrix at a time, plus the largest matrix while it is read and rounded."""
    head, total, largest = model.get_output_embeddings(), 0.0, 0
    for layer, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                has_8_bits = module is head or bits_of(layer, weight, bits) == 8
                total += weight.numel() * (1 if has_8_bits else 1 / 2 + 2 / GROUP)  # a float16 scale
                largest = max(largest, weight.numel())
            else:
                total += weight.numel() * weight.itemsize
    return total + largest * (model.dtype.itemsize + 1)

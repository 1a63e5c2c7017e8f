"""Loads targets, and causal LMs with their KV caches, in the requested precision and on the requested devices.

Quantized weights on a CPU come from the packed file that an earlier load has written, or are read and rounded one
matrix at a time, so that the checkpoint is never in memory as a whole.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.formats.gguf import is_gguf, read_gguf
from paradraft.formats.vocab_map import VocabMap
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
from paradraft.models.target import Target
from paradraft.placement import Stage
from paradraft.sources import gguf_model
from paradraft.sources.gguf_tokenizer import named_ends_of
from paradraft.sources.loading import (
    config_of,
    is_in_few_bits,
    load_generation_config,
    load_model,
    load_shard,
    load_skeleton,
    locate,
    room,
    settled,
    tokenizer_for,
    tokens_of,
)
from paradraft.sources.packed_file import PackedFile
from paradraft.sources.presets import random_model
from paradraft.sources.reduced_head import ReducedHead, reduced_head, set_head
from paradraft.sources.rounding_reader import files_of, fill
from paradraft.text.generation_config import PenaltyWarning, complaint, end_ids, penalty_complaint, suppressed_ids

LOG = logging.getLogger(__name__)


def load_target(name: str, runtime: Runtime, stages: Sequence[Stage] = (), ranks: int = 1) -> Target:
    """Loads the target and its tokenizer.

    Args:
        runtime: how it runs; its device is ignored with stages.
        stages: devices of its layers (pipeline); empty for one device.
        ranks: number of processes that share each layer, this one included (tensor parallelism).

    Raises:
        ValueError: there is no such model, or it cannot run like this.
    """
    folder, runtime = locate(name, "target"), settled(runtime, name)
    tokenizer = tokenizer_for(folder, runtime.tokenizer)
    vocab_size = tokens_of(config_of(folder), tokenizer)
    if ranks > 1:
        lm = causal_lm_of(load_shard(folder, runtime, ranks), vocab_size, runtime, runtime.capacity, ranks=ranks)
    elif stages:
        if runtime.dtype == STORED:
            raise ValueError(
                f"{name!r}: layers of weights that are stored in few bits are on one CPU: leave stages out"
            )
        dtype = str(runtime.computed_in).removeprefix("torch.")
        model = _weights(folder, replace(runtime, device="cpu", dtype=dtype))
        parts = split(model, stages)
        for part in parts:
            _quantize(part.model, runtime)
        lm = causal_lm_of(model, vocab_size, runtime, runtime.capacity, stages=parts)
    else:
        lm = load_lm(folder, runtime, vocab_size, runtime.capacity)
    target = Target(lm, tokenizer, _named_ends(folder, lm.model, tokenizer))
    _apply_generation_config(lm.model, target, name)
    return target


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


def load_lm(folder: str, runtime: Runtime, vocab_size: int, capacity: int | None) -> CausalLM:
    """Loads a causal LM with its KV cache; quantized weights on a CPU from the packed file of an earlier load.

    Args:
        vocab_size: number of ids that are tokens.
        capacity: maximum tokens of a row; None for the model's limit.

    Raises:
        ValueError: there is no such model, or it cannot run like this.
    """
    runtime = settled(runtime, folder)
    LOG.info("%s: reading", Path(folder).name)
    config, file = config_of(folder), None
    head = reduced_head(folder, config)
    lm_of = partial(
        causal_lm_of, vocab_size=vocab_size, runtime=runtime, capacity=capacity,
        vocab_map=None if head is None else head.vocab_map,
    )  # fmt: skip
    if _packs_few_bits(config, runtime):
        file = PackedFile.of(folder, config, dtype=runtime.dtype, computed_in=runtime.computed_in)
    if file is not None and (probe := file.read(model := _skeleton(folder, runtime, head))) is not None:
        with suppress(OtherLogitsError):
            return lm_of(model, probe=probe)
        file.warn_of_other_logits()
    lm = lm_of(_loaded(folder, runtime, head))
    if file is not None and lm.probe is not None:
        file.write(lm.model, lm.probe)
    return lm


def _packs_few_bits(config: PretrainedConfig, runtime: Runtime) -> bool:
    """Whether a model may run in C++ with quantized weights."""
    is_on_cpu, has_few_bits = torch.device(runtime.device).type == "cpu", runtime.dtype in (*QUANTIZED, STORED)
    return has_few_bits and is_on_cpu and runtime.compiled is not False and not spec_of(config).has_experts


def _skeleton(folder: str, runtime: Runtime, head: ReducedHead | None) -> PreTrainedModel:
    """A model on the meta device with its generation config."""
    model = load_skeleton(folder, runtime.computed_in)
    set_head(model, head)
    if not is_shape(folder):
        model.generation_config = load_generation_config(folder)
    return model


def _rounded_when_packed(folder: str, runtime: Runtime, head: ReducedHead | None) -> PreTrainedModel | None:
    """A model whose weights are read and rounded when its C++ pass packs them; None if that is not possible."""
    if (pieces := _read_in_pieces(folder, runtime, head)) is None:
        return None
    model, files = pieces
    fill(model, files, bits=QUANTIZED[runtime.dtype])
    return model if can_serve(model) else None


def _read_in_pieces(
    folder: str, runtime: Runtime, head: ReducedHead | None
) -> tuple[PreTrainedModel, dict[str, Path]] | None:
    """A model on the meta device, and the file of each weight; None if they are not rounded matrix by matrix."""
    if is_shape(folder) or runtime.dtype not in QUANTIZED or not _packs_few_bits(config_of(folder), runtime):
        return None
    if not is_built():
        return None
    model = _skeleton(folder, runtime, head)
    if not spec_of(model.config).is_in_cpp or (files := files_of(folder, model)) is None:
        return None
    return model, files


def _loaded(folder: str, runtime: Runtime, head: ReducedHead | None) -> PreTrainedModel:
    if (model := _rounded_when_packed(folder, runtime, head)) is not None:
        return model
    model = _weights(folder, runtime, head)
    _quantize(model, runtime)
    return model


def _weights(folder: str, runtime: Runtime, head: ReducedHead | None = None) -> PreTrainedModel:
    if is_shape(folder):
        return random_model(folder, dtype=runtime.computed_in, device=runtime.device)
    return load_model(folder, runtime, head=head)


def _quantize(model: PreTrainedModel, runtime: Runtime) -> None:
    if runtime.dtype in QUANTIZED:
        quantize(model, QUANTIZED[runtime.dtype])


def causal_lm_of(
    model: PreTrainedModel,
    vocab_size: int,
    runtime: Runtime,
    capacity: int | None,
    *,
    stages: Sequence[StageModel] = (),
    ranks: int = 1,
    probe: str | None = None,
    vocab_map: VocabMap | None = None,
) -> CausalLM:
    """A loaded model with its KV cache.

    Args:
        capacity: maximum tokens of a row; None for the model's limit.
        probe: of its C++ pass when its weights were packed; see `CausalLM`.
        vocab_map: the ids of a reduced output head's rows.
    """
    return CausalLM(
        model,
        vocab_size=vocab_size,
        capacity=room(model.config, capacity),
        width=runtime.width,
        compiled=runtime.compiled,
        pad_to=runtime.pad_to,
        cuda_graphs=runtime.cuda_graphs,
        stages=stages,
        ranks=ranks,
        probe=probe,
        vocab_map=vocab_map,
    )


def weights_bytes(name: str, runtime: Runtime) -> float:
    """Bytes of memory for a model's weights while it is loaded.

    Rounded weights count with their few bits if they are read one matrix at a time, because later loads map the same
    amount; if they are read as a whole, they count at full precision.

    Raises:
        ValueError: there is no such model, or it is no supported causal LM.
    """
    itemsize = runtime.computed_in.itemsize
    if is_gguf(name):
        return gguf_model.resident_bytes(read_gguf(name), itemsize)
    head = reduced_head(name, config_of(name))
    if (pieces := _read_in_pieces(name, runtime, head)) is not None:
        return _rounded_bytes(pieces[0], QUANTIZED[runtime.dtype])
    model = _skeleton(name, runtime, head)
    numbers = sum(weight.numel() for weight in model.parameters())
    if runtime.dtype != STORED or not is_in_few_bits(name):
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

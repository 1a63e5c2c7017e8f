"""A draft to train, made where the target has no small sibling, or one whose embedding does not fit."""

from __future__ import annotations

import copy
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.drafters.parts.previous_token import load_head, stored_head
from paradraft.formats.folder import save_model
from paradraft.formats.gguf import is_gguf
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD, declared_mask_id, forget_masks
from paradraft.models.architecture import context_of, has_experts
from paradraft.models.devices import TORCH_DTYPES
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import (
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    locate,
    settled,
)
from paradraft.text.vocabulary import free_id, of_one_family, resize, role_ids, unsaid_id, used_rows, without_role
from paradraft.train.init.init_from import InitFrom, PretrainedSibling, PrunedTarget, RandomInit
from paradraft.train.init.templates import template_text

MAX_LENGTH, ANSWER_TOKENS = 512, 64
"""Most tokens of a sample in the recipes beside a new draft, and the room that is left after it for the answers that
measure a drafter: `Recipe` has as many by default."""


@torch.no_grad()
def narrow(model: PreTrainedModel, size: int) -> None:
    """Keeps in every layer's MLP the neurons that can write most, and drops the others.

    A neuron writes down · silu(gate · x) · (up · x), so the product of the three norms bounds what it
    writes for inputs of norm 1. No text is needed for that, and training mends what the others leave.

    Args:
        model: with gated MLPs, as Llama and Qwen have; changed in place, its config too.
        size: neurons to keep in each layer, at most as many as there are.
    """
    for layer in model.model.layers:
        mlp, norm = layer.mlp, getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        scale = norm.weight.float() + (model.config.model_type == "gemma3_text")  # whose norms multiply by 1 + weight
        gates, ups = ((linear.weight.float() * scale).norm(dim=1) for linear in (mlp.gate_proj, mlp.up_proj))
        writes = gates * ups * mlp.down_proj.weight.float().norm(dim=0)
        kept = writes.topk(size).indices.sort().values
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight, linear.out_features = nn.Parameter(linear.weight[kept]), size
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias[kept])
        mlp.down_proj.weight, mlp.down_proj.in_features = nn.Parameter(mlp.down_proj.weight[:, kept]), size
        if hasattr(mlp, "intermediate_size"):
            mlp.intermediate_size = size
    model.config.intermediate_size = size


@dataclass(frozen=True, kw_only=True)
class NewDraft:
    """What was made.

    Args:
        layers: the target's layers that were kept; empty if none was.
        parameters: of the draft; a matrix that serves twice counts once.
        target_parameters: of the target.
        rows: of the draft's embedding.
        target_rows: of the target's.
        mask_id: the id that `train pard` will make the mask token, or has made; None if there is none.
        mask_token: what that id stands for so far: "a free row", "an added row", "its own", or a special token.
        elsewhere: where the target leaves no id for the mask: special tokens that a user may know to be in no text.
        recipes: files in the folder that train it, in this order.
    """

    layers: tuple[int, ...]
    parameters: int
    target_parameters: int
    rows: int
    target_rows: int
    mask_id: int | None
    mask_token: str
    elsewhere: tuple[str, ...]
    recipes: tuple[Path, ...]


def make(
    target: str,
    out: Path,
    origin: InitFrom,
    *,
    mask_token: bool = True,
    dtype: str | None = None,
) -> NewDraft:
    """Writes a draft with the target's tokenizer and as many rows of the embedding as the target has, and the recipes
    that train it.

    A row for the mask token is added if the target leaves no id for it, but nothing is called a mask token yet: the
    draft has never seen one. The recipe names the id, and `train pard` says so in the config.

    Args:
        target: whose text is to be guessed.
        out: the folder to write.
        origin: where the draft comes from.
        mask_token: add a row for the mask token if no id is free.
        dtype: of the weights, one of `TORCH_DTYPES`; the target's by default.

    Raises:
        ValueError: a model does not exist or cannot be used, or `out` holds something.
    """
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype={dtype!r}: use one of {', '.join(TORCH_DTYPES)}")
    _check_free(out)
    folder = locate(target, "target")
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    if context_of(config) < config.max_position_embeddings:
        raise ValueError(f"{target!r} has sliding-window layers, of which no draft is made: train a smaller relative")
    dtype = dtype or {kind: name for name, kind in TORCH_DTYPES.items()}.get(config.dtype, "float32")
    target_parameters = _parameters(config)
    layers: tuple[int, ...] = ()
    match origin:
        case PrunedTarget():
            layers = origin.of(config.num_hidden_layers)
            origin.check_narrower(config)
            model = _cut(target, folder, layers, dtype)
            if origin.intermediate_size is not None:
                narrow(model, origin.intermediate_size)
        case RandomInit():
            origin.check_smaller(config, target_parameters)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(origin.seed)
                model = AutoModelForCausalLM.from_config(
                    origin.config(config), dtype=torch.float32, trust_remote_code=False
                )
        case PretrainedSibling():
            model = _fitted(origin.name, target, config.vocab_size, tokenizer, dtype)
    if not layers:
        # The target's: it says where the texts end that are drafted.
        model.generation_config = load_generation_config(folder)
    mask_id, what = _mask_token(model, tokenizer, folder, origin, add=mask_token)
    recipes = _recipes(target, folder, out, origin, mask_id)
    previous = load_head(model.config)
    beside = {} if previous is None else {PREVIOUS_TOKEN_HEAD: stored_head(previous, model.config)}
    save_model(out, model.to(TORCH_DTYPES[dtype]), tokenizer, beside, recipes)
    return NewDraft(
        layers=layers, parameters=model.num_parameters(), target_parameters=target_parameters,
        rows=model.config.vocab_size, target_rows=config.vocab_size, mask_id=mask_id, mask_token=what,
        elsewhere=tuple(f"{index} ({token})" for index, token in _elsewhere(tokenizer, config, folder)),
        recipes=tuple(out / name for name in recipes),
    )  # fmt: skip


def _check_free(out: Path) -> None:
    if out.is_dir():
        if any(out.iterdir()):
            raise ValueError(f"{str(out)!r} is not empty: delete it, or choose another folder")
    elif out.exists():
        raise ValueError(f"{str(out)!r} is a file: choose another folder")
    above = next(folder for folder in out.resolve().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"{str(out)!r} cannot be written: {str(above)!r} is no folder, or not yours")


def _cut(name: str, folder: str, kept: tuple[int, ...], dtype: str) -> PreTrainedModel:
    if getattr(load_config(folder), "quantization_config", None) is not None:
        raise ValueError(f"{name!r} is quantized, and its layers cannot be trained: name the model it was made from")
    model = load_model(folder, Runtime(device="cpu", dtype=dtype))
    model.model.layers = torch.nn.ModuleList(model.model.layers[index] for index in kept)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    config = model.config
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]
    if has_experts(config):
        dense = (index for index, layer in enumerate(model.model.layers) if not hasattr(layer.mlp, "experts"))
        config.mlp_only_layers, config.decoder_sparse_step = list(dense), 1
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = sum(index < config.max_window_layers for index in kept)
    config.num_hidden_layers = len(kept)
    forget_masks(config)
    return model


def _fitted(name: str, target: str, rows: int, tokenizer: PreTrainedTokenizerBase, dtype: str) -> PreTrainedModel:
    folder = locate(name, "draft")
    config, theirs = load_config(folder), load_tokenizer(folder)
    if not of_one_family(tokenizer.get_vocab(), theirs.get_vocab()):
        raise ValueError(f"{name!r} has another vocabulary than {target!r}: use a model of the same family")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{name!r} is quantized, and cannot be trained: name the model it was made from")
    mask_id = declared_mask_id(config)
    needed = max(used_rows(theirs), 0 if mask_id is None else mask_id + 1)
    if rows < min(needed, config.vocab_size):
        raise ValueError(
            f"{name!r} uses {needed} rows of its embedding, {target!r} has {rows}: use a model of the same family"
        )
    model = load_model(folder, Runtime(device="cpu", dtype=dtype))
    resize(model, rows, used_rows(theirs))
    return model


def _mask_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: str, origin: InitFrom, *, add: bool
) -> tuple[int | None, str]:
    """The id that `train pard` is to take, and what it stands for; a row is added where the target leaves none."""
    if (known := declared_mask_id(model.config)) is not None:
        return known, "its own"
    rows, used = model.config.vocab_size, used_rows(tokenizer)
    taken = role_ids(model.config, model.generation_config, load_config(target), load_generation_config(target))
    found = free_id(tokenizer, rows, taken)
    if found is not None:
        return found, "a free row" if found >= used else str(tokenizer.convert_ids_to_tokens(found) or "a free row")
    if (unsaid := unsaid_id(tokenizer, _output_rows(model, target, origin), taken)) is not None:
        return unsaid, f"{tokenizer.convert_ids_to_tokens(unsaid)}, which the target never learnt to say"
    if not add:
        return None, ""
    resize(model, max(rows, used) + 1, used)
    return max(rows, used), "an added row"


def _output_rows(model: PreTrainedModel, target: str, origin: InitFrom) -> Tensor:
    """`[V, D]` an output head that has learnt which tokens are said: the target's, or that of a sibling."""
    if isinstance(origin, RandomInit):
        model = load_model(target, settled(Runtime(device="cpu"), target))
    return model.get_output_embeddings().weight


def _elsewhere(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, target: str) -> list[tuple[int, str]]:
    """The special tokens without a role that the target has a row for."""
    taken = role_ids(config, load_generation_config(target))
    found = [index for index in without_role(tokenizer, taken) if index < config.vocab_size]
    return [(index, str(tokenizer.convert_ids_to_tokens(index))) for index in found]


def _recipes(target: str, folder: str, out: Path, origin: InitFrom, mask_id: int | None) -> dict[str, str]:
    """The recipes that train a draft, by the names of their files: what was cut or began anew learns to be a draft
    first, and then to read masks."""
    config = load_config(folder)
    # Weights of few bits measure a drafter, and teach none.
    few_bits = is_gguf(folder) or getattr(config, "quantization_config", None) is not None
    role: dict[str, object] = {"teacher": None, "target": target} if few_bits else {"teacher": target}
    shared = role | {"max_length": min(MAX_LENGTH, context_of(config) - ANSWER_TOKENS)}
    kinds: list[tuple[str, str, dict[str, object]]] = [("pard", "generic", {"mask_token_id": mask_id})]
    if not isinstance(origin, PretrainedSibling):
        kinds.insert(0, ("ordinary", "ordinary", {}))
    made, model = {}, out
    for name, template, own in kinds:
        trained = out.with_name(f"{out.name}-{name}")
        settings = {"model": str(model), "out": str(trained)} | shared | own
        text = template_text("pard", template, out / f"{name}.yaml", settings)
        made[f"{name}.yaml"] = text.replace("--target TARGET", f"--target {shlex.quote(target)}")
        model = trained
    return made


def _parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    return int(model.num_parameters())

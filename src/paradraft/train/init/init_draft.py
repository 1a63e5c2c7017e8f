"""Makes an initial draft for targets without a small sibling, or with one whose embedding does not fit."""

from __future__ import annotations

import copy
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.drafters.parts.path_heads.previous_token import load_head, stored_head
from paradraft.formats.folder import check_free, save_model
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD, declared_mask_id, forget_masks, forget_states
from paradraft.models.architectures import context_of, spec_of
from paradraft.models.devices import TORCH_DTYPES
from paradraft.models.quantized import as_numbers
from paradraft.models.runtime import Runtime
from paradraft.sources.load_plan import plan_of
from paradraft.sources.loading import (
    load_config,
    load_generation_config,
    load_model,
    load_numbers,
    load_tokenizer,
    locate,
)
from paradraft.text.vocabulary import free_id, of_one_family, resize, role_ids, unsaid_id, used_rows, without_role
from paradraft.train.init.init_from import InitFrom, PretrainedSibling, PrunedTarget, RandomInit
from paradraft.train.init.templates import template_text

MAX_LENGTH, ANSWER_TOKENS = 512, 64
"""`max_length` in the recipes for a new draft, and the context reserved for the answers that measure acceptance
length: `Recipe.answer_tokens` by default."""


@torch.no_grad()
def narrow(model: PreTrainedModel, size: int) -> None:
    """Prunes every layer's gated MLP, in place, to the `size` neurons with the largest possible output.

    The output of a neuron is down · silu(gate · x) · (up · x), so the product of the three norms bounds it for inputs
    of norm 1. That needs no text, and training repairs the loss of the other neurons.
    """
    for layer in model.model.layers:
        mlp, norm = layer.mlp, getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
        scale = norm.weight.float() + spec_of(model.config).norm_offset
        gates, ups = ((linear.weight.float() * scale).norm(dim=1) for linear in (mlp.gate_proj, mlp.up_proj))
        bounds = gates * ups * mlp.down_proj.weight.float().norm(dim=0)
        kept = bounds.topk(size).indices.sort().values
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
    """Description of a new draft.

    Args:
        layers: indices of the target's layers that were kept, if any.
        parameters: of the draft; a shared matrix counts once.
        mask_id: the mask token of `train pard`, in future or already; None if there is none.
        mask_token: current use of that id: "a free row", "an added row", "its own", or a special token.
        elsewhere: special tokens of which a user may know that no text contains them, as alternative mask tokens.
        recipes: files that train the draft, in this order.
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
    """Writes a draft with the target's tokenizer and embedding size, and the recipes that train it.

    A row for the mask token is added if the target has no free id. The draft's config does not declare a mask token
    yet, because the draft is not trained on it: the recipe names the id, and `train pard` declares it.

    Args:
        mask_token: add a row for the mask token if no id is free.
        dtype: of the weights, one of `TORCH_DTYPES`; the target's by default.

    Raises:
        ValueError: a model does not exist or cannot be used, or `out` is not empty.
    """
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype={dtype!r}: use one of {', '.join(TORCH_DTYPES)}")
    check_free(out)
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
            model = _cut(folder, layers, dtype)
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
        # The target's, because it has the end tokens of the texts to draft.
        model.generation_config = load_generation_config(folder)
    mask_id, mask_use = _mask_token(model, tokenizer, folder, origin, add=mask_token)
    recipes = _recipes(target, folder, out, origin, mask_id)
    previous = load_head(model.config)
    extra_files = {} if previous is None else {PREVIOUS_TOKEN_HEAD: stored_head(previous, model.config)}
    save_model(out, model.to(TORCH_DTYPES[dtype]), tokenizer, extra_files, recipes)
    return NewDraft(
        layers=layers, parameters=model.num_parameters(), target_parameters=target_parameters,
        rows=model.config.vocab_size, target_rows=config.vocab_size, mask_id=mask_id, mask_token=mask_use,
        elsewhere=tuple(f"{index} ({token})" for index, token in _elsewhere(tokenizer, config, folder)),
        recipes=tuple(out / name for name in recipes),
    )  # fmt: skip


def _cut(folder: str, kept: tuple[int, ...], dtype: str) -> PreTrainedModel:
    model = load_numbers(folder, Runtime(device="cpu", dtype=dtype))
    model.model.layers = torch.nn.ModuleList(model.model.layers[index] for index in kept)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    config = model.config
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]
    if spec_of(config).has_experts:
        dense = (index for index, layer in enumerate(model.model.layers) if not hasattr(layer.mlp, "experts"))
        config.mlp_only_layers, config.decoder_sparse_step = list(dense), 1
    if getattr(config, "max_window_layers", None) is not None:
        config.max_window_layers = sum(index < config.max_window_layers for index in kept)
    config.num_hidden_layers = len(kept)
    forget_masks(config)
    return model


def _fitted(name: str, target: str, rows: int, tokenizer: PreTrainedTokenizerBase, dtype: str) -> PreTrainedModel:
    folder = locate(name, "draft")
    config, draft_tokenizer = load_config(folder), load_tokenizer(folder)
    if not of_one_family(tokenizer.get_vocab(), draft_tokenizer.get_vocab()):
        raise ValueError(f"{name!r} has another vocabulary than {target!r}: use a model of the same family")
    mask_id = declared_mask_id(config)
    needed = max(used_rows(draft_tokenizer), 0 if mask_id is None else mask_id + 1)
    if rows < min(needed, config.vocab_size):
        raise ValueError(
            f"{name!r} uses {needed} rows of its embedding, {target!r} has {rows}: use a model of the same family"
        )
    model = load_numbers(folder, Runtime(device="cpu", dtype=dtype))
    forget_states(model.config)
    resize(model, rows, used_rows(draft_tokenizer))
    return model


def _mask_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: str, origin: InitFrom, *, add: bool
) -> tuple[int | None, str]:
    """Chooses the mask token for `train pard`, and describes its id; adds a row if the target has no free id."""
    if (known := declared_mask_id(model.config)) is not None:
        return known, "its own"
    rows, used = model.config.vocab_size, used_rows(tokenizer)
    taken = role_ids(model.config, model.generation_config, load_config(target), load_generation_config(target))
    free = free_id(tokenizer, rows, taken)
    if free is not None:
        return free, "a free row" if free >= used else str(tokenizer.convert_ids_to_tokens(free) or "a free row")
    if (unsaid := unsaid_id(tokenizer, _output_rows(model, target, origin), taken)) is not None:
        return unsaid, f"{tokenizer.convert_ids_to_tokens(unsaid)}, which the target never learnt to say"
    if not add:
        return None, ""
    resize(model, max(rows, used) + 1, used)
    return max(rows, used), "an added row"


def _output_rows(model: PreTrainedModel, target: str, origin: InitFrom) -> Tensor:
    """`[V, D]` a trained output head, of the target or a sibling, which shows the tokens that are never output."""
    if isinstance(origin, RandomInit):
        model = load_model(target, plan_of(target, Runtime(device="cpu")).runtime)
    return as_numbers(model.get_output_embeddings().weight)


def _elsewhere(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, target: str) -> list[tuple[int, str]]:
    taken = role_ids(config, load_generation_config(target))
    ids = [index for index in without_role(tokenizer, taken) if index < config.vocab_size]
    return [(index, str(tokenizer.convert_ids_to_tokens(index))) for index in ids]


def _recipes(target: str, folder: str, out: Path, origin: InitFrom, mask_id: int | None) -> dict[str, str]:
    """Recipes that train a draft, by file name: a pruned or random draft is trained as an ordinary draft first, then
    with masks."""
    shared = {"teacher": target, "max_length": min(MAX_LENGTH, context_of(load_config(folder)) - ANSWER_TOKENS)}
    stages: list[tuple[str, str, dict[str, object]]] = [("pard", "generic", {"mask_token_id": mask_id})]
    if not isinstance(origin, PretrainedSibling):
        stages.insert(0, ("ordinary", "ordinary", {}))
    texts, model = {}, out
    for name, template, own in stages:
        trained = out.with_name(f"{out.name}-{name}")
        settings = {"model": str(model), "out": str(trained)} | shared | own
        text = template_text("pard", template, out / f"{name}.yaml", settings)
        texts[f"{name}.yaml"] = text.replace("--target TARGET", f"--target {shlex.quote(target)}")
        model = trained
    return texts


def _parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    return int(model.num_parameters())

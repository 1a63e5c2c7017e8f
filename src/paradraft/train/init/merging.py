"""Low-rank adapters in files: those of a trained PARD draft beside it, and any that PEFT has written, merged into their
base (Hu et al. 2021, section 4.1).

The adapter of a draft is 1/50 of its weights or less. Its folder has PEFT's two files, and what makes the merged model
a draft: its `config.json`, the norm, the ids of a trimmed head's rows, and the previous-token head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, PeftType, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.errors import is_out_of_memory
from paradraft.formats.folder import ADAPTER_CONFIG, check_free, save_model
from paradraft.formats.pard import (
    CONFIG_KEYS,
    PREVIOUS_TOKEN_HEAD,
    RANK,
    TRAINED_K,
    TRAINED_LENGTH,
    declared_mask_id,
    forget_masks,
)
from paradraft.formats.vocab_map import D2T, VocabMap
from paradraft.models.architectures import spec_of
from paradraft.models.names import POCKET, check_has_weights, is_shape
from paradraft.models.runtime import Runtime
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.loading import load_config, load_numbers, load_tokenizer
from paradraft.sources.loading_errors import loading_of
from paradraft.sources.reduced_head import cut_head, store_map
from paradraft.text.vocabulary import resize, set_to_mean, used_rows
from paradraft.train.init.adaptation import EMBEDDINGS, without_deprecations

FOLDER = "adapter"
"""Folder of the adapter, in that of the draft."""
WEIGHTS, DRAFT = "adapter_model.safetensors", "draft.safetensors"
NORM = "norm"
CLOSE = 2e-2
"""Relative difference of two norms of one model, each rounded to bfloat16, once before and once after a scaling."""
SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip
"""Config keys in which a draft is like its base."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What low-rank training changed in a model.

    Args:
        weights: of the adapters and of the trained embeddings, by PEFT's names.
        config: PEFT's.
    """

    weights: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    @torch.no_grad()
    def of(cls, adapted: PeftModel, base: str) -> Adapter:
        """Takes the adapters of a model before they are merged, and rounds them, in place, as they are stored, so that
        both merge to the same bits.

        Args:
            base: name of the model without adapters.
        """
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.copy_(weight.bfloat16())
        weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        name = str(Path(base).resolve()) if Path(base).exists() else base
        config = adapted.peft_config["default"].to_dict() | {"base_model_name_or_path": name, "inference_mode": True}
        return cls(weights={name: weight.bfloat16() for name, weight in weights.items()}, config=config)

    def files(
        self, draft: PreTrainedModel, beside: Mapping[str, dict[str, Tensor]]
    ) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
        """The safetensors and the texts to store, by relative path.

        Args:
            draft: merged.
            beside: further tensors of the draft, by relative path.
        """
        own = {NORM: cast(Any, draft.model).norm.weight.detach()}
        own |= {} if (d2t := getattr(draft, D2T, None)) is None else {D2T: d2t}
        tensors = {WEIGHTS: self.weights, DRAFT: own, **beside}
        config = json.dumps(self.config, indent=2, sort_keys=True, default=sorted)
        texts = {ADAPTER_CONFIG: config, "config.json": draft.config.to_json_string()}
        return (
            {f"{FOLDER}/{name}": each for name, each in tensors.items()},
            {f"{FOLDER}/{name}": text for name, text in texts.items()},
        )


def base_of(adapter: Path) -> str | None:
    """The name of an adapter's base model, if its config has one.

    Raises:
        ValueError: it is no adapter that can be merged.
    """
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
        base = config.get("base_model_name_or_path") or None
    except (OSError, ValueError, AttributeError):
        within = adapter / FOLDER
        hint = f": name {str(within)!r}" if (within / ADAPTER_CONFIG).is_file() else ""
        raise ValueError(f"{str(adapter)!r} is no adapter: it has no {ADAPTER_CONFIG} that can be read{hint}") from None
    fits = {
        "base_model_name_or_path": isinstance(base, str | None),
        "layer_replication": not config.get("layer_replication"),
        "peft_type": config.get("peft_type") in PeftType.__members__,
    }
    if (wrong := next((key for key, is_fit in fits.items() if not is_fit), None)) is not None:
        raise ValueError(f"{str(adapter)!r} cannot be merged: {wrong} in its {ADAPTER_CONFIG} is {config.get(wrong)!r}")
    if not (adapter / WEIGHTS).is_file():
        raise ValueError(f"{str(adapter)!r} has no {WEIGHTS}: save it as safetensors")
    if not (adapter / DRAFT).is_file() and _is_draft(adapter):
        raise ValueError(f"{str(adapter)!r} has no {DRAFT}, which belongs to the adapter of a draft: copy it whole")
    return base


def _is_draft(adapter: Path) -> bool:
    """Whether the config.json beside an adapter is that of a draft with masks."""
    return (adapter / "config.json").is_file() and declared_mask_id(load_config(str(adapter))) is not None


def merge(adapter: Path, base: Checkpoint, out: Path) -> None:
    """Writes the model that an adapter makes of its base, in bfloat16.

    Args:
        adapter: folder of PEFT, or of a PARD draft's adapter; the latter becomes that draft.
        base: model that the adapter was trained on, or the same in fewer bits.
        out: a new or empty folder.

    Raises:
        ValueError: one of them cannot be loaded, they do not fit, or `out` is not empty.
    """
    if str(out) == POCKET or is_shape(str(out)):
        raise ValueError(f"{str(out)!r} is the name of a model: choose another folder, such as ./{out}-merged")
    check_free(out)
    check_has_weights(base.name)
    wanted = load_config(str(adapter)) if (adapter / DRAFT).is_file() else None
    if wanted is not None:
        _check_shape(wanted, base)
    has_tokens = (adapter / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(str(adapter) if has_tokens else base.folder, base.config)
    # Adapters are added in float32, so sums are rounded once, also where the base is in bfloat16.
    dtype = "bfloat16" if base.config.dtype == torch.bfloat16 else "float32"
    model = load_numbers(base.folder, Runtime(device="cpu", dtype=dtype), head=base.head)
    rows = None if base.head is None else base.head.vocab_map
    with loading_of(f"adapter {str(adapter)!r}"), without_deprecations():
        stored, beside = _numbers_in(adapter / WEIGHTS), dict[str, dict[str, Tensor]]()
        if wanted is None:
            _make_room(model, stored, rows, tokenizer)
        else:
            _make_draft(model, adapter, wanted, rows, tokenizer)
            if getattr(wanted, RANK, None) is not None:
                beside[PREVIOUS_TOKEN_HEAD] = _numbers_in(adapter / PREVIOUS_TOKEN_HEAD)
        merged = _merged(model, adapter, stored, base.name)
    save_model(out, merged.to(torch.bfloat16).eval(), tokenizer, beside)


def _numbers_in(file: Path) -> dict[str, Tensor]:
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} in {file.name} has NaN or infinite numbers: take an earlier checkpoint")
    return tensors


def _check_shape(wanted: PretrainedConfig, base: Checkpoint) -> None:
    for key in SHAPE:
        if (own := getattr(base.config, key, None)) != (trained := getattr(wanted, key, None)):
            raise ValueError(
                f"the adapter was trained on a model whose {key} is {trained}, and that of {base.name!r} is {own}"
            )


def _make_room(
    model: PreTrainedModel, stored: Mapping[str, Tensor], rows: VocabMap | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Prepares a base, in place: for added tokens, and for an adapter of a head that is the embedding too."""
    if rows is not None:
        store_map(model, rows)
    whole = [len(weight) for name, weight in stored.items() if "embed_tokens" in name and "lora_" not in name]
    if whole:
        resize(model, whole[0], used_rows(tokenizer))
    if model.config.tie_word_embeddings and any(
        "lora_" in name and part in name for name in stored for part in EMBEDDINGS
    ):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _merged(model: PreTrainedModel, adapter: Path, stored: Mapping[str, Tensor], base: str) -> PreTrainedModel:
    """The base with its adapters, each in its layer; peft ignores those without one."""
    try:
        adapted = PeftModel.from_pretrained(model, adapter)
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        fits = {name for name in own if "lora_" in name} == {name for name in stored if "lora_" in name}
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        fits = False
    if not fits:
        raise ValueError(f"its layers are not those of {base!r}: name the model that it was trained on")
    if adapted.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{adapted.active_peft_config.peft_type.value} is read before each text: it has no weights to merge"
        )
    return cast(PreTrainedModel, cast(Any, adapted).merge_and_unload())


@torch.no_grad()
def _make_draft(
    model: PreTrainedModel,
    adapter: Path,
    wanted: PretrainedConfig,
    rows: VocabMap | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Gives a base, in place, the rows, norm and config of a draft."""
    stored, used = _numbers_in(adapter / DRAFT), used_rows(tokenizer)
    resize(model, wanted.vocab_size, used)
    norm, offset = cast(Any, model.model).norm.weight, spec_of(model.config).norm_offset
    own, trained = (normalize(each.float() + offset, dim=0) for each in (norm, stored[NORM]))
    if not torch.allclose(own, trained, rtol=CLOSE, atol=CLOSE**2):
        raise ValueError("its base has another final norm: name the model that it was trained on")
    norm.copy_(stored[NORM])
    if rows is not None and D2T not in stored:
        raise ValueError("its base is trimmed, and it was trained on the whole one: name that")
    if D2T in stored:
        d2t = stored[D2T]
        vocab_map = VocabMap.stored(d2t, None, rows=len(d2t), vocabulary=wanted.vocab_size, name=str(adapter))
        if rows is None:
            cut_head(model, vocab_map.to_target, vocab_map)
        elif not torch.equal(rows.to_target, vocab_map.to_target):
            raise ValueError("the rows of its output head are other ones than those of its trimmed base")
        else:
            store_map(model, vocab_map)
    first, masks = declared_mask_id(wanted), getattr(wanted, "pard_masks", 1)
    if first is not None and first != declared_mask_id(model.config):
        set_to_mean(model, slice(first, first + masks), used)
    forget_masks(model.config)
    for key in (*CONFIG_KEYS, TRAINED_LENGTH, TRAINED_K):
        if (value := getattr(wanted, key, None)) is not None:
            setattr(model.config, key, value)

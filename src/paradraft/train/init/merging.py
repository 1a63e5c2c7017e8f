"""Low-rank adapters in files: those of a trained PARD draft beside it, and any that PEFT has written, merged into their
base (Hu et al. 2021, section 4.1).

The adapter of a draft is 1/50 of its weights or less. Its folder has PEFT's two files, which any program reads, and
what makes the merged model a draft: its `config.json`, the norm, the ids of a trimmed head's rows, and the
previous-token head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.errors import is_out_of_memory
from paradraft.formats.folder import ADAPTER_CONFIG, check_free, save_model
from paradraft.formats.pard import CONFIG_KEYS, PREVIOUS_TOKEN_HEAD, TRAINED_LENGTH
from paradraft.formats.vocab_map import D2T, VocabMap
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config, load_numbers, load_tokenizer, locate
from paradraft.sources.loading_errors import loading_of
from paradraft.sources.reduced_head import cut_head, reduced_head, store_map
from paradraft.text.vocabulary import resize, used_rows
from paradraft.train.init.adaptation import without_deprecations

FOLDER = "adapter"
"""Folder of the adapter, in that of the draft."""
WEIGHTS, DRAFT = "adapter_model.safetensors", "draft.safetensors"
NORM = "norm"
CLOSE = 2e-2
"""Relative difference of two norms of one model, each rounded to bfloat16, once before and once after a scaling."""
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
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
        config = adapted.peft_config["default"].to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
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
        return {f"{FOLDER}/{name}": each for name, each in tensors.items()}, {
            f"{FOLDER}/{name}": text for name, text in texts.items()
        }


def base_of(adapter: Path) -> str | None:
    """The name of an adapter's base model, if its config has one.

    Raises:
        ValueError: it is no adapter.
    """
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
        return config.get("base_model_name_or_path") or None
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{str(adapter)!r} is no adapter: it has no {ADAPTER_CONFIG} that can be read") from None


def merge(adapter: Path, base: str, out: Path) -> None:
    """Writes the model that an adapter makes of its base, in bfloat16.

    Args:
        adapter: folder of PEFT, or of a PARD draft's adapter; the latter becomes that draft.
        base: model that the adapter was trained on, or the same in fewer bits.
        out: a new or empty folder.

    Raises:
        ValueError: one of them cannot be loaded, they do not fit, or `out` is not empty.
    """
    check_free(out)
    folder = locate(base, "draft")
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    head = reduced_head(folder, config)
    wanted = load_config(str(adapter)) if (adapter / "config.json").is_file() else None
    if wanted is not None:
        _check_shape(wanted, config, base)
    # Sums are rounded once, to bfloat16, also where the base is in it, because adapters are added in float32.
    dtype = "bfloat16" if config.dtype == torch.bfloat16 else "float32"
    model = load_numbers(folder, Runtime(device="cpu", dtype=dtype), head=head)
    rows = None if head is None else head.vocab_map
    with loading_of(f"adapter {str(adapter)!r}"), without_deprecations():
        if wanted is not None:
            _make_draft(model, adapter, wanted, rows, tokenizer)
        adapted = _adapted(model, adapter, base)
        merged = cast(PreTrainedModel, cast(Any, adapted).merge_and_unload())
        previous = adapter / PREVIOUS_TOKEN_HEAD
        beside = {PREVIOUS_TOKEN_HEAD: load_file(previous)} if previous.is_file() else {}
    save_model(out, merged.to(torch.bfloat16).eval(), tokenizer, beside)


def _check_shape(wanted: PretrainedConfig, config: PretrainedConfig, base: str) -> None:
    for key in SHAPE:
        if (own := getattr(config, key, None)) != (trained := getattr(wanted, key, None)):
            raise ValueError(
                f"the adapter was trained on a model whose {key} is {trained}, and that of {base!r} is {own}"
            )


def _adapted(model: PreTrainedModel, adapter: Path, base: str) -> PeftModel:
    """The base with its adapters, each in its layer; peft ignores those without one."""
    stored = load_file(adapter / WEIGHTS)
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
    return adapted


@torch.no_grad()
def _make_draft(
    model: PreTrainedModel,
    adapter: Path,
    wanted: PretrainedConfig,
    rows: VocabMap | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Gives a base, in place, the rows, norm and config of a draft."""
    stored = load_file(adapter / DRAFT)
    resize(model, wanted.vocab_size, used_rows(tokenizer))
    norm = cast(Any, model.model).norm.weight
    if not torch.allclose(normalize(norm.float(), dim=0), normalize(stored[NORM].float(), dim=0), rtol=CLOSE, atol=0):
        raise ValueError("its base has another final norm: name the model that it was trained on")
    norm.copy_(stored[NORM])
    if D2T in stored:
        d2t = stored[D2T]
        vocab_map = VocabMap.stored(d2t, None, rows=len(d2t), vocabulary=wanted.vocab_size, name=str(adapter))
        if rows is None:
            cut_head(model, vocab_map.to_target, vocab_map)
        elif not torch.equal(rows.to_target, vocab_map.to_target):
            raise ValueError("the rows of its output head are other ones than those of its trimmed base")
        else:
            store_map(model, vocab_map)
    for key in (*CONFIG_KEYS, TRAINED_LENGTH):
        if (value := getattr(wanted, key, None)) is not None:
            setattr(model.config, key, value)

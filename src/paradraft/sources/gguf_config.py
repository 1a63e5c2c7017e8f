"""The config of a GGUF file's model, from its metadata; and the metadata of a config."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig

from paradraft.formats.gguf import PARD_MASKS, PARD_TOKEN, GgufFile, read_gguf
from paradraft.formats.gguf_blocks import KINDS, Blocks, unpacked
from paradraft.formats.pard import declare_masks
from paradraft.models.architectures import FAMILIES, head_size
from paradraft.models.config_check import check_architecture
from paradraft.sources.gguf_tokenizer import end_ids_of
from paradraft.text.generation_config import SAMPLED

EMBEDDING, HEAD, ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
QUERIES = "blk.0.attn_q.weight"
SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
"""Keys after "general.sampling." by the setting in `generation_config.json`."""
LLAMA3_CONTEXTS = (8192, 4096, 16384, 32768)
"""Original context lengths tried for Llama 3's rotary embedding, because files store only the resulting factors."""


def architectures() -> list[str]:
    """The values of `general.architecture` whose files are read and written."""
    return [family for family, spec in FAMILIES.items() if spec.gguf == family]


def settings_of(config: PretrainedConfig) -> dict[str, int | float]:
    """GGUF metadata of a config, by key without the architecture's prefix; without scaling of the rotary embedding."""
    head = head_size(config)
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def stored_dtype(file: GgufFile) -> torch.dtype | None:
    """The dtype of the largest tensor; None if it is quantized."""
    largest = max(file.tensors.values(), key=lambda tensor: tensor.size_bytes)
    return KINDS[largest.kind].dtype


def config_of(name: str) -> PretrainedConfig:
    """The config of a GGUF file's model.

    Raises:
        ValueError: the file does not exist, has an unsupported architecture, or is damaged.
    """
    file = read_gguf(name)
    architecture = file.get("general.architecture", str)
    if architecture not in architectures():
        raise ValueError(
            f"{name!r} is a file of the architecture {architecture!r}; supported are {', '.join(architectures())}, as "
            "files of Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 models have"
        )
    reader = _Settings(file, architecture)
    settings = {**reader.common(), **reader.attention(), **reader.tokens()}
    try:
        config: PretrainedConfig = CONFIG_MAPPING[architecture](**settings)
    except StrictDataclassError as error:
        raise ValueError(f"{name!r} has settings that make no model: {error.__cause__ or error}") from None
    mask = file.find(PARD_TOKEN, int)
    if mask is not None:
        declare_masks(config, mask, file.find(PARD_MASKS, int) or 1)
    config.name_or_path = name
    check_architecture(config, name)
    return config


class _Settings:
    """Reads the settings of a config from a file's metadata."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture
        self._name = str(file.path)

    def _find(self, key: str, kind: type[Any]) -> Any:
        value = self._file.find(f"{self._architecture}.{key}", kind)
        return shortest(value) if kind is float and value is not None else value

    def _get(self, key: str, kind: type[Any]) -> Any:
        self._file.get(f"{self._architecture}.{key}", kind)
        return self._find(key, kind)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._file.tensors:
            raise ValueError(f"{self._name!r} has no tensor {tensor}: it is no whole model, get the file again")
        return self._file.tensors[tensor].shape

    def common(self) -> dict[str, Any]:
        """Sizes, norms, activation and dtype."""
        if (layers := self._get("block_count", int)) > len(self._file.tensors):
            raise ValueError(f"{self._name!r} has {layers} layers and {len(self._file.tensors)} tensors: it is damaged")
        if self._find("expert_count", int):
            raise ValueError(f"{self._name!r} is a mixture of experts, whose files are not read: use a model's folder")
        if self._find("attention.sliding_window", int):
            raise ValueError(f"{self._name!r} has sliding windows, whose files are not read: use a model's folder")
        return {
            "vocab_size": self._shape(EMBEDDING)[0],
            "hidden_size": self._get("embedding_length", int),
            "intermediate_size": self._get("feed_forward_length", int),
            "num_hidden_layers": layers,
            "max_position_embeddings": self._get("context_length", int),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon", float),
            "hidden_act": "silu",
            "tie_word_embeddings": HEAD not in self._file.tensors,
            "dtype": stored_dtype(self._file),
        }

    def attention(self) -> dict[str, Any]:
        """Heads and rotary embedding."""
        hidden, heads = self._get("embedding_length", int), self._get("attention.head_count", int)
        size = self._find("attention.key_length", int) or (hidden // heads if heads else 0)
        if (rows := self._shape(QUERIES)[0]) != heads * size:  # before the head size is used
            raise ValueError(
                f"{self._name!r} has {rows} rows of queries, and its settings say {heads} heads of {size}: damaged"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if (value := self._find(key, int) or size) != size:
                raise ValueError(
                    f"{self._name!r}: {key} is {value} and heads have {size} numbers: use a model's folder"
                )
        settings = {
            "num_attention_heads": heads,
            "num_key_value_heads": self._find("attention.head_count_kv", int) or heads,
            "head_dim": size,
            "rope_parameters": self._rope(size),
        }
        if hasattr(CONFIG_MAPPING[self._architecture], "mlp_bias"):  # else the family has biases, or has none
            biases = [f"blk.0.attn_{part}.bias" in self._file.tensors for part in ("q", "k", "v", "output")]
            settings["attention_bias"] = any(biases)
            settings["mlp_bias"] = "blk.0.ffn_gate.bias" in self._file.tensors
        return settings

    def _rope(self, size: int) -> dict[str, Any]:
        theta = self._find("rope.freq_base", float) or 10000.0
        kind = self._find("rope.scaling.type", str) or "none"
        if ROPE in self._file.tensors:
            return {"rope_theta": theta, **self._llama3(theta, size)}
        if (linear := self._find("rope.scale_linear", float)) is not None and kind == "none":
            return {"rope_type": "linear", "rope_theta": theta, "factor": linear}
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        factor = self._get("rope.scaling.factor", float)
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind == "yarn":
            original = self._get("rope.scaling.original_context_length", int)
            return {
                "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original
            }  # fmt: skip
        raise ValueError(f"{self._name!r}: rope.scaling.type is {kind!r}, and only none, linear and yarn are read")

    def _llama3(self, theta: float, size: int) -> dict[str, Any]:
        """Llama 3's rope settings, recovered from the stored divisors of the frequencies."""
        factors = numbers_of(self._file, ROPE).flatten().double()
        factor = float(factors.max())
        original = self._find("rope.scaling.original_context_length", int)
        for context in (original,) if original else LLAMA3_CONTEXTS:
            settings: dict[str, Any] = {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }  # fmt: skip
            expected = llama3_factors(theta, size, **settings)
            if factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-5, atol=0):
                return settings
        raise ValueError(
            f"{self._name!r}: {ROPE} is not what Llama 3's rotary embedding has for theta={theta}: use a model's folder"
        )

    def tokens(self) -> dict[str, Any]:
        """Special tokens."""
        rows, ids = self._shape(EMBEDDING)[0], {}
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            token = self._file.find(f"tokenizer.ggml.{key}_token_id", int)
            ids[f"{role}_token_id"] = token if token is not None and token < rows else None
        return ids


def shortest(number: float) -> float:
    """The shortest decimal that rounds to this float32 number, as in the model's own config.

    >>> shortest(9.999999974752427e-07)
    1e-06
    """
    return float(np.format_float_scientific(np.float32(number), unique=True))


def llama3_factors(
    theta: float, size: int, *, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int, **_: object,
) -> Tensor:  # fmt: skip
    """Divisors `[size / 2]` of the frequencies of Llama 3's rotary embedding, in float64.

    Args:
        size: of a head.
        factor: divisor of the lowest frequencies.
        high_freq_factor: of frequencies that are not scaled.
        original_max_position_embeddings: context length before scaling.
    """
    frequencies = (1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)).double()
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def generation_config_of(name: str) -> GenerationConfig:
    """End tokens, named by the file or known in its vocabulary, and sampling settings.

    Raises:
        ValueError: see `config_of`; or a sampling setting is no number.
    """
    config, file = config_of(name), read_gguf(name, vocabulary=True)
    ends = [token for token in end_ids_of(file) if 0 <= token < config.vocab_size]
    sampling = {
        ours: shortest(value)
        for ours, theirs in SAMPLING.items()
        if (value := file.find(f"general.sampling.{theirs}", float)) is not None
    }
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends or None, pad_token_id=config.pad_token_id,
        do_sample=sampling.get("temperature") != 0 if {*sampling} & {*SAMPLED} else None, **sampling,
    )  # fmt: skip


def numbers_of(file: GgufFile, tensor: str) -> Tensor:
    """An unquantized tensor, in its own dtype; raises ValueError if it is quantized."""
    weight = unpacked(file.tensors[tensor].kind, file.bytes_of(tensor))
    if isinstance(weight, Blocks):
        raise ValueError(f"{str(file.path)!r}: the tensor {tensor} has few bits, where numbers belong")
    return weight.view(file.tensors[tensor].shape)

"""A causal LM of a GGUF file: its config, and its weights as they are stored.

The rows of queries and keys of Llama files are in another order than those of `transformers`, as llama.cpp rotates
neighbours; a permutation of rows is exact in every type of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from paradraft.formats.gguf import PARD_MASKS, PARD_TOKEN, GgufFile, read_gguf
from paradraft.formats.gguf_blocks import KINDS, Blocks, unpacked
from paradraft.formats.pard import declare_masks
from paradraft.models.architecture import check_architecture
from paradraft.models.quantized import Parts, QuantizedTensor
from paradraft.sources.gguf_tokenizer import end_ids_of
from paradraft.sources.stored_weights import Weight, assembled, lossless_dtype, quantized
from paradraft.text.generation_config import SAMPLED

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
"""The architectures that are read, by their names in a file; Mistral's models are `llama` there."""
PERMUTED = ("llama",)
EMBEDDING, HEAD, ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
QUERIES = "blk.0.attn_q.weight"
OUTER = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""What the parts of a layer are called in a file and in `transformers`."""
SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
"""What settings of `generation_config.json` are called in a file, after "general.sampling."."""
LLAMA3_CONTEXTS = (8192, 4096, 16384, 32768)
"""Context lengths before scaling that are tried for Llama 3's rotary embedding: files hold only its result."""


def names_of(layers: int) -> Iterator[tuple[str, str]]:
    """The names of all tensors that a model may have: in a file, and in `transformers`."""
    yield from OUTER.items()
    for layer in range(layers):
        for theirs, ours in INNER.items():
            for part in ("weight", "bias"):
                yield f"blk.{layer}.{theirs}.{part}", f"model.layers.{layer}.{ours}.{part}"


def settings_of(config: PretrainedConfig) -> dict[str, int | float]:
    """The settings of a model as a file has them, after the architecture's name; those that scale the rotary embedding
    are not among them."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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


def has_few_bits(file: GgufFile) -> bool:
    """Whether any weights of a file have few bits."""
    return any(KINDS[tensor.kind].unpack is not None for tensor in file.tensors.values())


def resident_bytes(file: GgufFile, itemsize: int) -> int:
    """Bytes that the weights take in memory: those of few bits as many as in the file.

    Args:
        file: the header.
        itemsize: bytes of a number in the dtype that the others are computed in.
    """
    return sum(
        tensor.size_bytes if KINDS[tensor.kind].unpack is not None else math.prod(tensor.shape) * itemsize
        for tensor in file.tensors.values()
    )


def stored_dtype(file: GgufFile) -> torch.dtype | None:
    """The dtype of most weights; None if they have few bits."""
    largest = max(file.tensors.values(), key=lambda tensor: tensor.size_bytes)
    return KINDS[largest.kind].dtype


def config_of(name: str) -> PretrainedConfig:
    """The config of a file's model.

    Raises:
        ValueError: there is no such file, or it is of another architecture, or damaged.
    """
    file = read_gguf(name)
    architecture = file.get("general.architecture", str)
    if architecture not in CONFIGS:
        raise ValueError(
            f"{name!r} is a file of the architecture {architecture!r}; supported are {', '.join(CONFIGS)}, as files of "
            "Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 models have"
        )
    reader = _Settings(file, architecture)
    settings = {**reader.common(), **reader.attention(), **reader.tokens()}
    try:
        config: PretrainedConfig = CONFIGS[architecture](**settings)
    except StrictDataclassError as error:
        raise ValueError(f"{name!r} has settings that make no model: {error.__cause__ or error}") from None
    mask = file.find(PARD_TOKEN, int)
    if mask is not None:
        declare_masks(config, mask, file.find(PARD_MASKS, int) or 1)
    config.name_or_path = name
    check_architecture(config, name)
    return config


class _Settings:
    """The settings of a config, read from a file's metadata."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture
        self._name = str(file.path)

    def _find(self, key: str, kind: type[Any]) -> Any:
        found = self._file.find(f"{self._architecture}.{key}", kind)
        return shortest(found) if kind is float and found is not None else found

    def _get(self, key: str, kind: type[Any]) -> Any:
        self._file.get(f"{self._architecture}.{key}", kind)
        return self._find(key, kind)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._file.tensors:
            raise ValueError(f"{self._name!r} has no tensor {tensor}: it is no whole model, get the file again")
        return self._file.tensors[tensor].shape

    def common(self) -> dict[str, Any]:
        """Sizes, and what the model computes between layers."""
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
        if (rows := self._shape(QUERIES)[0]) != heads * size:  # before anything of a head's size is computed
            raise ValueError(
                f"{self._name!r} has {rows} rows of queries, and its settings say {heads} heads of {size}: damaged"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self._find(key, int) or size) != size:
                raise ValueError(
                    f"{self._name!r}: {key} is {found} and heads have {size} numbers: use a model's folder"
                )
        found = {
            "num_attention_heads": heads,
            "num_key_value_heads": self._find("attention.head_count_kv", int) or heads,
            "head_dim": size,
            "rope_parameters": self._rope(size),
        }
        if self._architecture == "llama":
            biases = [f"blk.0.attn_{part}.bias" in self._file.tensors for part in ("q", "k", "v", "output")]
            found["attention_bias"] = any(biases)
            found["mlp_bias"] = "blk.0.ffn_gate.bias" in self._file.tensors
        return found

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
        """The settings of which the file has the result: by what each frequency is divided."""
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
        rows, found = self._shape(EMBEDDING)[0], {}
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            token = self._file.find(f"tokenizer.ggml.{key}_token_id", int)
            found[f"{role}_token_id"] = token if token is not None and token < rows else None
        return found


def shortest(number: float) -> float:
    """The decimal number with the fewest digits that is this float32 number: what the model's own config has.

    >>> shortest(9.999999974752427e-07)
    1e-06
    """
    return float(np.format_float_scientific(np.float32(number), unique=True))


def llama3_factors(
    theta: float, size: int, *, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int, **_: object,
) -> Tensor:  # fmt: skip
    """By what Llama 3 divides the frequencies of its rotary embedding: `[size / 2]`, in float64.

    Args:
        theta: the base of the frequencies.
        size: of a head.
        factor: by which the lowest are divided.
        low_freq_factor: see `transformers`, for the others too.
        high_freq_factor: of waves that are not stretched.
        original_max_position_embeddings: tokens before stretching.
    """
    frequencies = (1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)).double()
    turns = original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def generation_config_of(name: str) -> GenerationConfig:
    """How texts end, by the tokens that a file names and those that its vocabulary has, and how tokens are chosen.

    Raises:
        ValueError: see `config_of`; or a setting of sampling is no number.
    """
    config, file = config_of(name), read_gguf(name, vocabulary=True)
    ends = [token for token in end_ids_of(file) if 0 <= token < config.vocab_size]
    found = {
        ours: shortest(value)
        for ours, theirs in SAMPLING.items()
        if (value := file.find(f"general.sampling.{theirs}", float)) is not None
    }
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends or None, pad_token_id=config.pad_token_id,
        do_sample=found.get("temperature") != 0 if {*found} & {*SAMPLED} else None, **found,
    )  # fmt: skip


def numbers_of(file: GgufFile, tensor: str) -> Tensor:
    """A tensor of numbers, in its own dtype.

    Raises:
        ValueError: it has few bits.
    """
    found = unpacked(file.tensors[tensor].kind, file.bytes_of(tensor))
    if isinstance(found, Blocks):
        raise ValueError(f"{str(file.path)!r}: the tensor {tensor} has few bits, where numbers belong")
    return found.view(file.tensors[tensor].shape)


def load(name: str, dtype: torch.dtype, *, attention: str) -> PreTrainedModel:
    """The model of a file, on the CPU.

    Args:
        name: of the file.
        dtype: of activations, and of the weights that are numbers; float32 beside weights of few bits where bfloat16
            would round one of those.
        attention: `attn_implementation`.

    Raises:
        ValueError: see `config_of`; or a weight is missing, or has another shape.
    """
    file, config = read_gguf(name), config_of(name)
    theirs = {ours: their for their, ours in names_of(config.num_hidden_layers) if their in file.tensors}
    if has_few_bits(file):
        plain = [each for each in theirs.values() if KINDS[file.tensors[each].kind].unpack is None]
        dtype = lossless_dtype((numbers_of(file, each) for each in plain), dtype)

    def read(ours: str) -> Weight | None:
        if ours not in theirs:
            return None
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(ours.split(".")[-2])
        order = None
        if heads is not None and config.model_type in PERMUTED:
            order = row_order(heads, config.head_dim)
        return _stored(file, theirs[ours], order, dtype)

    model = assembled(config, read, name=name, dtype=dtype, attention=attention)
    used = {theirs.get(key) for key, _ in model.named_parameters()}
    if unused := sorted({*file.tensors} - used - {ROPE}):
        raise ValueError(
            f"{name!r} has the tensor {unused[0]}, which a {config.model_type} model has not: it is another kind of "
            "model than it says, use a model's folder"
        )
    model.generation_config = generation_config_of(name)
    return model


def row_order(heads: int, size: int) -> Tensor:
    """Where each row of queries or keys, as `transformers` orders them, is in a Llama file.

    >>> row_order(1, 6).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()


def _stored(file: GgufFile, name: str, order: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A tensor of a file; one of few bits is unpacked when its parts are asked for.

    Args:
        file: the header.
        name: of the tensor.
        order: of its rows; None for that of the file.
        dtype: that products with few bits are in.
    """
    tensor = file.tensors[name]
    if order is not None and len(order) != tensor.shape[0]:
        order = None  # another shape than the config says, about which the caller complains
    if KINDS[tensor.kind].unpack is None:
        numbers = numbers_of(file, name)
        return numbers if order is None else numbers[order]
    rows = _StoredRows(file=file, name=name, order=order)
    first = quantized(rows.blocks([0]), dtype)
    return QuantizedTensor.elsewhere(rows, tensor.shape, format=first.format, group=first.group, dtype=dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class _StoredRows:
    """Weights of few bits that are read and unpacked when their parts are asked for.

    Args:
        file: the header.
        name: of the tensor.
        order: of its rows; None for that of the file.
    """

    file: GgufFile
    name: str
    order: Tensor | None

    def blocks(self, rows: list[int] | None = None) -> Blocks:
        """The weights of some rows of the file, or of all."""
        found = unpacked(self.file.tensors[self.name].kind, self.file.bytes_of(self.name, rows))
        assert isinstance(found, Blocks)
        return found

    def __call__(self) -> Parts:
        """The parts."""
        return self._parts(None if self.order is None else self.order.tolist())

    def rows(self, outputs: Tensor) -> Parts:
        """See `HasRows`."""
        return self._parts((outputs if self.order is None else self.order[outputs]).tolist())

    def _parts(self, rows: list[int] | None) -> Parts:
        blocks = self.blocks(rows)
        return blocks.values, blocks.scales, blocks.offsets

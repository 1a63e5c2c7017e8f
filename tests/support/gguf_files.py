"""GGUF files of tiny models, written with the `gguf` package: its names of tensors, its blocks of few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

FAMILIES: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3
}  # fmt: skip
TEXT = "def f(x):\n    return x ** 2 + 1  # the square of x, and one more\n\nfor i in range(10):\n    print(f(i))\n"
END, TURN = "<|endoftext|>", "<|im_end|>"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|im_end|>{% endfor %}a: "
BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}
"""Of types that the package cannot make: bytes of a block, and where it has float16 numbers."""
ROWS = 8
"""Rows of the embedding after the last token."""


def tiny_tokenizer(regex: str | None = None) -> PreTrainedTokenizerFast:
    """BPE of bytes, with merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END, TURN], initial_alphabet=sorted(bytes_to_unicode().values()),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)


def tiny_model(family: str, *, tied: bool = True, width: int = 64, seed: int = 3, **more: Any) -> PreTrainedModel:
    """A random model in float32 whose weights are bfloat16 numbers, for `tiny_tokenizer`."""
    torch.manual_seed(seed)
    model_class, config_class = FAMILIES[family]
    settings = {
        "vocab_size": len(tiny_tokenizer()) + ROWS, "hidden_size": width, "intermediate_size": 2 * width,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4,
        "max_position_embeddings": 128, "tie_word_embeddings": tied, "initializer_range": 0.3, "bos_token_id": None,
        "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    model = model_class(config_class(**settings | more))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += 0.3 * torch.randn(weight.shape) if "norm" in name or "bias" in name else 0.0
            weight.copy_(weight.bfloat16().float())
    return model.eval().requires_grad_(False)


def tokens_of(tokenizer: PreTrainedTokenizerFast, rows: int) -> tuple[list[str], list[int]]:
    """The tokens and their kinds, as llama.cpp's converter writes them."""
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds = [3 if index in special else 1 if index in names else 5 for index in range(rows)]
    return [names.get(index, f"[PAD{index}]") for index in range(rows)], kinds


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str | Callable[[str], str] = "Q8_0",
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    more: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Writes a model; norms and biases are F32, as in all files.

    Args:
        path: of the file.
        model: in float32.
        kind: of the matrices, or for each name in the file.
        tokenizer: by default `tiny_tokenizer`.
        more: metadata in place of what is written otherwise; None leaves a key out.
        without: tensors to leave out.

    Returns:
        The model whose weights are what `gguf.quants.dequantize` makes of the file, in float64.
    """
    config, tokenizer = model.config, tokenizer or tiny_tokenizer()
    writer = gguf.GGUFWriter(path, config.model_type)
    tokens, kinds = tokens_of(tokenizer, config.vocab_size)
    backend = tokenizer.backend_tokenizer
    arch = config.model_type
    metadata = {
        f"{arch}.context_length": config.max_position_embeddings, f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers, f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim if arch != "qwen2" else None,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges_of(backend),
        "tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": tokenizer.chat_template,
    }  # fmt: skip
    for key, value in (metadata | dict(more or {})).items():
        add_value(writer, key, value)
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers)
    expected = {}
    for ours, weight in model.state_dict().items():
        if config.tie_word_embeddings and ours == "lm_head.weight":
            continue
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, ours
        if theirs in without:
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-2])
        is_permuted = arch == "llama" and heads is not None
        stored = permuted(weight, heads) if is_permuted else weight
        chosen = "F32" if weight.ndim == 1 else kind if isinstance(kind, str) else kind(theirs)
        data = blocks(stored.numpy(), chosen)
        writer.add_tensor(theirs, data, raw_dtype=Kind[chosen])
        numbers = torch.from_numpy(gguf.quants.dequantize(data, Kind[chosen]).reshape(stored.shape).copy())
        expected[ours] = unpermuted(numbers, heads) if is_permuted else numbers
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    copy = type(model)(config).double().eval()
    copy.load_state_dict(expected, strict=False)
    return copy.requires_grad_(False)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds metadata of the type that llama.cpp reads."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def merges_of(backend: Tokenizer) -> list[str]:
    import json

    merges = json.loads(backend.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to queries and keys of Llama models."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    pairs = weight.reshape(heads, len(weight) // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def blocks(weight: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of weights; of types that the package cannot make, random blocks of about their size."""
    if kind not in BLOCKS:
        return gguf.quants.quantize(np.ascontiguousarray(weight), Kind[kind])
    size, halves = BLOCKS[kind]
    chooser = np.random.default_rng(weight.size + int(abs(weight[0, 0]) * 1000))
    raw = chooser.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=np.uint8)
    for at in halves:
        numbers = (np.abs(weight).max() / 2000 * chooser.uniform(0.5, 1, (*raw.shape[:2], 1))).astype(np.float16)
        raw[:, :, at : at + 2] = numbers.view(np.uint8)
    return raw.reshape(len(weight), -1)


def llama3_factors(config: Any) -> np.ndarray:
    """By what the frequencies of a rotary embedding are divided: the loop of llama.cpp's converter."""
    rope, size = config.rope_parameters, config.head_dim
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size):
        wave = 2 * np.pi / float(frequency)
        if wave < context / high:
            found.append(1.0)
        elif wave > context / low:
            found.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)

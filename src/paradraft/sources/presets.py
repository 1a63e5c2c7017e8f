"""Shapes of known models: their configs with random weights, made on the device where they run.

The cost of a pass does not depend on the weights' values, so a shape can be timed without a download. Its text is
noise: its tokenizer writes token ids as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from paradraft.models.names import PREFIX


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that determine the cost of a model's passes.

    Args:
        hidden: width of the hidden states.
        intermediate: width inside an MLP.
        heads: query heads per layer.
        kv_heads: key/value heads per layer.
        head_dim: width of a head.
        rows: of the embedding.
        tokens: rows that the family's tokenizer uses.
        tied: whether the embedding is also the output head.
        positions: maximum tokens of a text.
    """

    architecture: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    tokens: int
    tied: bool
    positions: int

    @property
    def mask_id(self) -> int:
        """The mask token of a PARD drafter: the first row that no token uses, or the last token."""
        return min(self.tokens, self.rows - 1)

    def config(self, *, positions: int | None = None) -> PretrainedConfig:
        """The config of `transformers`, with default rotary frequencies, which do not affect the cost.

        It has no end tokens and names a mask token, so that the shape can be a target and any draft model. `positions`
        limits the tokens of a text; by default the model's own limit holds.
        """
        return AutoConfig.for_model(
            self.architecture,
            vocab_size=self.rows,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=positions or self.positions,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            mask_token_id=self.mask_id,
        )


def _shape(architecture: str, tokens: int, rows: int, positions: int, tied: bool, *sizes: int) -> Shape:
    hidden, intermediate, layers, heads, kv_heads, head_dim = sizes
    return Shape(
        architecture=architecture, tokens=tokens, rows=rows, positions=positions, tied=tied, hidden=hidden,
        intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip


# tokens, rows, positions, tied, then hidden, intermediate, layers, heads, key/value heads, head size
SHAPES = {
    "llama-3.1-8b": _shape("llama", 128256, 128256, 131072, False, 4096, 14336, 32, 32, 8, 128),
    "llama-3.2-3b": _shape("llama", 128256, 128256, 131072, True, 3072, 8192, 28, 24, 8, 128),
    "llama-3.2-1b": _shape("llama", 128256, 128256, 131072, True, 2048, 8192, 16, 32, 8, 64),
    "qwen2.5-7b": _shape("qwen2", 151665, 152064, 32768, False, 3584, 18944, 28, 28, 4, 128),
    "qwen2.5-0.5b": _shape("qwen2", 151665, 151936, 32768, True, 896, 4864, 24, 14, 2, 64),
    "qwen3-8b": _shape("qwen3", 151669, 151936, 40960, False, 4096, 12288, 36, 32, 8, 128),
    "qwen3-0.6b": _shape("qwen3", 151669, 151936, 40960, True, 1024, 3072, 28, 16, 8, 128),
    "smollm2-360m": _shape("llama", 49152, 49152, 8192, True, 960, 2560, 32, 15, 5, 64),
    "smollm2-135m": _shape("llama", 49152, 49152, 8192, True, 576, 1536, 30, 9, 3, 64),
    "pocket-target": _shape("qwen3", 4096, 4096, 512, True, 320, 864, 8, 5, 5, 64),
    "pocket-draft": _shape("qwen3", 4096, 4096, 512, True, 320, 368, 4, 5, 5, 64),
    "tiny-target": _shape("llama", 96, 104, 512, True, 32, 48, 2, 4, 2, 8),
    "tiny-draft": _shape("llama", 96, 100, 512, True, 16, 24, 1, 2, 2, 8),
}
"""Published configs by name, the pocket family's, and two that are small enough for tests."""


def shape_of(name: str) -> Shape:
    """The shape of a name such as "shape:llama-3.1-8b"; raises ValueError if there is no such shape."""
    if name.removeprefix(PREFIX) not in SHAPES:
        raise ValueError(f"unknown shape {name!r}: use {PREFIX} and one of {', '.join(SHAPES)}")
    return SHAPES[name.removeprefix(PREFIX)]


def random_model(name: str, *, dtype: torch.dtype, device: str, positions: int | None = None) -> PreTrainedModel:
    """A model of a shape with random weights, the same for the same name, dtype and device.

    Args:
        dtype: in which the weights are made, so that peak memory is theirs.
        positions: maximum tokens of a text; by default the model's.

    Raises:
        ValueError: there is no such shape.
    """
    torch_device = torch.device(device)
    gpus = [torch_device.index or 0] if torch_device.type == "cuda" else []
    config = shape_of(name).config(positions=positions)
    with torch.random.fork_rng(devices=gpus), torch_device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.eval()


def id_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a shape: numbers separated by spaces are token ids, without the mask token's.

    >>> tokenizer = id_tokenizer("shape:tiny-target")
    >>> tokenizer("7 42 95")["input_ids"], tokenizer.decode([7, 42]), max(tokenizer.get_vocab().values())
    ([7, 42, 95], '7 42', 95)
    """
    vocabulary = {str(token): token for token in range(shape_of(name).mask_id)}
    numbers = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=numbers)

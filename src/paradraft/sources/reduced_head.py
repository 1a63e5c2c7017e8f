"""Draft models whose output head has fewer rows than their embedding: the head is read beside the model.

Shape letters: U rows of the head, V rows of the embedding, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from paradraft.formats.gguf import is_gguf
from paradraft.formats.vocab_map import D2T, T2D, VocabMap
from paradraft.models.names import is_shape
from paradraft.sources.loading_errors import loading_of
from paradraft.sources.rounding_reader import read_tensor, stored_tensors
from paradraft.sources.stored_weights import HEAD

ROWS = "draft_vocab_size"
"""Config key of such a model, which only one on Hugging Face needs: its files are then fetched and looked through."""


@dataclass(frozen=True, kw_only=True)
class ReducedHead:
    """A stored output head, and the ids of its rows.

    Args:
        file: the file of its weights.
        shape: U, D.
    """

    vocab_map: VocabMap
    file: Path
    shape: tuple[int, int]


def reduced_head(name: str, config: PretrainedConfig) -> ReducedHead | None:
    """The reduced head of a causal LM; None if its files have no `d2t`.

    Raises:
        ValueError: the map of its rows is damaged, see `VocabMap.stored`, or the config ties the head to the embedding.
    """
    if is_shape(name) or is_gguf(name):
        return None
    folder = name
    if not Path(name).is_dir():
        if getattr(config, ROWS, None) is None:
            return None
        with loading_of(f"model {name!r}"):
            folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json"])
    stored = stored_tensors(folder) or {}
    if D2T not in stored or HEAD not in stored:
        return None
    if config.tie_word_embeddings:
        raise ValueError(
            f"draft {name!r}: with {D2T} the output head is not the embedding: set tie_word_embeddings to false in its "
            "config.json"
        )
    d2t, t2d = (read_tensor(stored[key][0], key) if key in stored else None for key in (D2T, T2D))
    assert d2t is not None
    file, (rows, width) = stored[HEAD]
    vocab_map = VocabMap.stored(d2t, t2d, rows=rows, vocabulary=config.vocab_size, name=name)
    return ReducedHead(vocab_map=vocab_map, file=file, shape=(rows, width))


@torch.no_grad()
def cut_head(model: PreTrainedModel, rows_U: Tensor, vocab_map: VocabMap) -> None:
    """Leaves a model, in place, these rows of its output head, and the map that is stored beside them.

    The embedding keeps all rows, also where it was the head too.

    Args:
        rows_U: indices of the rows.
        vocab_map: the ids of these rows.
    """
    weight_UD = model.get_output_embeddings().weight.detach()[rows_U].clone()
    linear = nn.Linear(weight_UD.shape[1], len(rows_U), bias=False, device="meta", dtype=model.dtype)
    linear.weight = nn.Parameter(weight_UD, requires_grad=False)
    model.set_output_embeddings(linear)
    store_map(model, vocab_map)


def store_map(model: PreTrainedModel, vocab_map: VocabMap) -> None:
    """Lets a model's folder, once it is saved, have the map of its output head."""
    model.config.tie_word_embeddings = False
    setattr(model.config, ROWS, len(vocab_map.to_target))
    model.register_buffer(D2T, vocab_map.d2t().to(model.device))
    model.register_buffer(T2D, vocab_map.t2d(model.config.vocab_size).to(model.device))


@torch.no_grad()
def set_head(model: PreTrainedModel, head: ReducedHead | None) -> frozenset[str]:
    """Replaces a model's output head, unless None; on the meta device without reading its weights.

    Returns:
        The names of the stored tensors that no other code needs to read.
    """
    if head is None:
        return frozenset()
    rows, width = head.shape
    linear = nn.Linear(width, rows, bias=False, device="meta", dtype=model.dtype)
    if model.device.type != "meta":
        weight_UD = read_tensor(head.file, HEAD).to(model.device, model.dtype)
        linear.weight = nn.Parameter(weight_UD, requires_grad=False)
    model.set_output_embeddings(linear)
    return frozenset((HEAD, D2T, T2D))

"""The model whose probabilities a drafter learns instead of single tokens.

It runs beside the drafter on the same texts; what it expects is computed for a few rows at a time
and never stored.

Shape letters: S groups of samples, N tokens of the longest, M rows, D its width, V rows of the
drafter's embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.models.architecture import context_of
from paradraft.models.forward import FINAL_NORM
from paradraft.models.forward.eager import layer_by_layer
from paradraft.models.output_head import logits_of
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_model, load_tokenizer, locate
from paradraft.text.vocabulary import check_rows, of_one_family
from paradraft.train.objectives.batch import Texts
from paradraft.train.objectives.losses import IMPOSSIBLE
from paradraft.train.objectives.rows import Rows, attention_mask


class Teacher:
    """A causal LM that says what it expects after each token of the texts.

    Args:
        model: with the drafter's tokenizer.
        vocab_size: ids from here on are never chosen in decoding, so they get no probability.
        mask_id: the drafter's mask token, if it has one; it is never chosen either.
        masks: how many ids from there on are masks.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, mask_id: int | None, masks: int = 1) -> None:
        model.requires_grad_(False)
        self.model = model
        self.vocab_size = min(vocab_size, model.config.vocab_size)
        self.mask_id = mask_id
        self.masks = masks

    @torch.no_grad()
    def read(self, texts: Texts, cache: Cache | None = None) -> Tensor:
        """Reads the texts of a batch.

        Args:
            texts: of the batch.
            cache: takes their keys and values.

        Returns:
            `[S, N, D]` last hidden states, for `expects`.
        """
        hidden: Tensor = self.model.model(
            input_ids=texts.tokens,
            attention_mask=attention_mask(_rows(texts), self.model),
            position_ids=texts.positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return hidden

    @torch.no_grad()
    def states(self, texts: Texts, layers: Sequence[int]) -> Tensor:
        """Reads the texts of a batch.

        Args:
            texts: of the batch.
            layers: whose states are wanted, named as in `paradraft.models.forward.Forward`.

        Returns:
            `[S, N, layers * D]` the states of these layers side by side.
        """
        if list(layers) == [FINAL_NORM]:
            return self.read(texts)
        settings = {"attention_mask": attention_mask(_rows(texts), self.model), "position_ids": texts.positions}
        body: Any = self.model.model
        found = layer_by_layer(body, body.embed_tokens(texts.tokens), settings)
        return torch.cat([found[layer] for layer in layers], dim=-1)

    @torch.no_grad()
    def expects(self, hidden_MD: Tensor, width: int) -> Tensor:
        """What comes next after some places of the texts.

        Args:
            hidden_MD: `[M, D]` their hidden states. Rows of several depths ask for the same place: give
                each place once.
            width: V of the drafter's logits.

        Returns:
            `[M, V]` logits in float32; `IMPOSSIBLE` where decoding never chooses.
        """
        logits = logits_of(self.model, hidden_MD)[:, : self.vocab_size].float()
        logits = F.pad(logits, (0, width - self.vocab_size), value=IMPOSSIBLE)
        if self.mask_id is not None:
            logits[:, self.mask_id : self.mask_id + self.masks] = IMPOSSIBLE
        return logits


def _rows(texts: Texts) -> Rows:
    """Texts are rows without masks."""
    return Rows(position=texts.positions, depth=torch.zeros_like(texts.positions), document=texts.documents)


def teacher_folder(name: str) -> str:
    """The folder or Hugging Face id of a teacher.

    Raises:
        ValueError: there is no such model.
    """
    with _as_teacher():
        return locate(name, "target")


@contextmanager
def _as_teacher() -> Iterator[None]:
    """Lets a mistake say that it is about the teacher."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"teacher: {error}") from None


def load_teacher(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask_id: int | None,
    masks: int = 1,
    longest: int,
    largest: int,
    runtime: Runtime,
) -> Teacher:
    """Loads a teacher for a drafter.

    Args:
        name: a Hugging Face id, a folder, or "pocket".
        tokenizer: the drafter's.
        mask_id: the drafter's mask token, if it has one.
        masks: how many ids from there on are masks.
        longest: most tokens of a sample.
        largest: token id of the samples.
        runtime: device and dtype.

    Raises:
        ValueError: there is no such model, its tokens are others, it has no row for one of the samples', or its
            context is too short.
    """
    folder = teacher_folder(name)
    with _as_teacher():
        theirs = load_tokenizer(folder).get_vocab()
    ours = tokenizer.get_vocab()
    if not of_one_family(ours, theirs):
        raise ValueError(f"teacher {name!r} has another vocabulary than the model: use one of the same family")
    model = load_model(folder, runtime)
    check_rows(model.config.vocab_size, largest, f"teacher {name!r}")
    if longest > context_of(model.config):
        room = context_of(model.config)
        raise ValueError(f"teacher {name!r} has room for {room} tokens, a sample has {longest}: set max_length={room}")
    return Teacher(model, vocab_size=max(ours.values()) + 1, mask_id=mask_id, masks=masks)

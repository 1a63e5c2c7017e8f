"""The model whose probabilities a drafter learns instead of single tokens.

Shape letters: S samples, N tokens of the longest, M labelled rows, V rows of the drafter's embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paradraft.models.loading import Runtime, load_model, load_tokenizer, locate
from paradraft.train.losses import IGNORED
from paradraft.train.pard import Batch
from paradraft.train.vocabulary import of_one_family


class Teacher:
    """A causal LM that answers for every label of a batch.

    Args:
        model: with the drafter's tokenizer.
        vocab_size: ids from here on are never chosen in decoding, so they get no probability.
        mask_id: the drafter's mask token, if it has one; it is never chosen either.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, mask_id: int | None) -> None:
        model.requires_grad_(False)
        self.model = model
        self.vocab_size = min(vocab_size, model.config.vocab_size)
        self.mask_id = mask_id

    @torch.no_grad()
    def probabilities(self, batch: Batch, width: int) -> Tensor:
        """What the model expects in place of each label, knowing all the tokens before it.

        Args:
            batch: its M labelled rows, in the order of `pard.forward`.
            width: V of the drafter's logits.

        Returns:
            `[M, V]` probabilities.
        """
        sample, row = (batch.labels != IGNORED).nonzero(as_tuple=True)
        # Rows of several depths ask for the same token: the head runs once for each.
        place, which = (sample * batch.texts.shape[1] + batch.positions[sample, row]).unique(return_inverse=True)
        hidden = self.model.model(input_ids=batch.texts, use_cache=False).last_hidden_state.flatten(0, 1)
        logits = self.model.lm_head(hidden[place])[:, : self.vocab_size].float()
        if self.mask_id is not None and self.mask_id < self.vocab_size:
            logits[:, self.mask_id] = -torch.inf
        answers = logits.new_zeros(len(place), width)
        answers[:, : self.vocab_size] = logits.softmax(-1)
        return answers[which]


def load_teacher(
    name: str, tokenizer: PreTrainedTokenizerBase, *, mask_id: int | None, longest: int, runtime: Runtime
) -> Teacher:
    """Loads a teacher for a drafter.

    Args:
        name: a Hugging Face id, a folder, or "pocket".
        tokenizer: the drafter's.
        mask_id: the drafter's mask token, if it has one.
        longest: most tokens of a sample.
        runtime: device and dtype.

    Raises:
        ValueError: there is no such model, its tokens are others, or its context is too short.
    """
    try:
        folder = locate(name, "target")
        theirs = load_tokenizer(folder).get_vocab()
    except ValueError as error:
        raise ValueError(f"teacher: {error}") from None
    ours = tokenizer.get_vocab()
    if not of_one_family(ours, theirs):
        raise ValueError(f"teacher {name!r} has another vocabulary than the model: use one of the same family")
    model = load_model(folder, runtime)
    if longest > model.config.max_position_embeddings:
        room = model.config.max_position_embeddings
        raise ValueError(f"teacher {name!r} has room for {room} tokens, a sample has {longest}: set max_length={room}")
    return Teacher(model, vocab_size=max(ours.values()) + 1, mask_id=mask_id)

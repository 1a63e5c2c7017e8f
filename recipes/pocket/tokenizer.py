"""Trains the family's byte-level BPE tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# The embedding has 4096 rows; the eight spare ones leave room for a mask token without resizing.
VOCAB_SIZE = 4088


def train_tokenizer(texts: Iterable[str], *, max_length: int) -> PreTrainedTokenizerFast:
    """A GPT-2 style byte-level BPE tokenizer of `VOCAB_SIZE` tokens; id 0 is end-of-text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=None,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )

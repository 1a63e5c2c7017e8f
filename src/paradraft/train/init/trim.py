"""Trims a draft model's output head to the ids of a text that its target writes (VocabTrim, Goel et al. 2025).

Nothing is trained: the rows of ids that the target hardly writes are left out, so that passes read fewer bytes.

Shape letters: U rows of the trimmed head, R rows of the head before, V ids of the vocabulary, D hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paradraft.data.dataset import load_samples
from paradraft.data.samples import hold_out, label_counts
from paradraft.drafters.parts.path_heads.previous_token import load_head, stored_head
from paradraft.formats.folder import check_free, save_model
from paradraft.formats.gguf import is_gguf
from paradraft.formats.head import is_head
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD
from paradraft.formats.pard2 import projection_file
from paradraft.formats.vocab_map import VocabMap
from paradraft.models.names import check_has_weights
from paradraft.models.runtime import Runtime
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.loading import load_generation_config, load_numbers, load_tokenizer, locate
from paradraft.sources.reduced_head import cut_head
from paradraft.text.vocabulary import check_rows, named_ends
from paradraft.train.init.vocabulary_size import Coverage

HELD_OUT = 10
"""One in this many answers is kept aside, to say what share of new text has rows."""
WHOLE = sys.maxsize
"""Longest answer, in tokens: none is cut."""


@dataclass(frozen=True, kw_only=True)
class Untrimmed:
    """A draft model to trim.

    Args:
        checkpoint: a causal LM; its head may have fewer rows than the vocabulary already.
        ends: ids that end a text or a turn.
        row_ids: `[R]` ids of its head's rows, increasing.
    """

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    row_ids: Tensor

    @classmethod
    def find(cls, draft: str) -> Untrimmed:
        """Locates a draft model and reads all but its weights.

        Raises:
            ValueError: there is none, or it is no causal LM.
        """
        check_has_weights(draft)
        folder = locate(draft, "draft")
        if not is_gguf(folder) and is_head(folder):
            raise ValueError(
                f"{draft!r} drafts on its target's states: it cannot be trimmed, train it with draft_vocab_size"
            )
        checkpoint = Checkpoint.at(folder, draft)
        config = checkpoint.config
        tokenizer = load_tokenizer(folder, config)
        ends = named_ends(config, load_generation_config(folder, config)) | {tokenizer.eos_token_id} - {None}
        row_ids = torch.arange(config.vocab_size) if checkpoint.head is None else checkpoint.head.vocab_map.to_target
        return cls(checkpoint=checkpoint, tokenizer=tokenizer, ends=ends, row_ids=row_ids)

    @property
    def always(self) -> list[int]:
        """Rows that are never left out: those of `ends`. A mask token is read and never drafted, so it needs none."""
        return [row for row, token in enumerate(self.row_ids.tolist()) if token in self.ends]

    def map_of(self, rows: VocabMap) -> VocabMap:
        """The ids of some of its rows."""
        return VocabMap(to_target=self.row_ids[rows.to_target])


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Tokens of answers, the end tokens included.

    Args:
        counted: `[R]` times that the id of each row is in the answers that choose the rows.
        held_out: `[R]` the same of those kept aside; zeros if there are too few answers.
        tokens: of the counted answers, those without a row included.
        held_out_tokens: likewise.
        answers: that were counted.
    """

    counted: Tensor
    held_out: Tensor
    tokens: int
    held_out_tokens: int
    answers: int

    def coverage(self, always: Sequence[int]) -> Coverage:
        """Shares of the tokens that the first rows cover; see `Coverage`."""
        return Coverage.of(
            self.counted, self.held_out, tokens=self.tokens, held_out_tokens=self.held_out_tokens, always=always
        )


def count(draft: Untrimmed, answers: Sequence[Path]) -> AnswerCounts:
    """Counts the tokens that the target wrote: the labels of training on the same files.

    Args:
        answers: files as `paradraft regenerate` writes and `paradraft train` reads them.

    Raises:
        ValueError: a file cannot be read, there is no answer, or one has a token outside the draft's vocabulary.
    """
    samples = load_samples(
        answers, draft.tokenizer, max_length=WHOLE, long="truncate", end_ids=draft.ends, skip_unlabelled=True
    )
    counted, held_out = hold_out(samples, len(samples) // HELD_OUT)
    vocabulary = draft.checkpoint.config.vocab_size
    check_rows(vocabulary, int(max(np.asarray(sample.tokens).max() for sample in samples)), draft.checkpoint.name)
    counted_V, held_out_V = label_counts(counted, vocabulary), label_counts(held_out, vocabulary)
    return AnswerCounts(
        counted=counted_V[draft.row_ids], held_out=held_out_V[draft.row_ids], tokens=int(counted_V.sum()),
        held_out_tokens=int(held_out_V.sum()), answers=len(counted),
    )  # fmt: skip


@torch.no_grad()
def write_trimmed(draft: Untrimmed, rows: VocabMap, out: Path) -> None:
    """Writes a draft in bfloat16 with these rows of its head.

    Weights that are stored in few bits become numbers. Mask token, previous-token head, projection of the target's
    states, trained length and tokenizer stay the same.

    Raises:
        ValueError: the draft cannot be loaded, or `out` is not empty.
    """
    check_free(out)
    runtime = Runtime(device="cpu", dtype="bfloat16")
    model = load_numbers(draft.checkpoint.folder, runtime, head=draft.checkpoint.head)
    cut_head(model, rows.to_target, draft.map_of(rows))
    previous = load_head(model.config)
    extra_files = {} if previous is None else {PREVIOUS_TOKEN_HEAD: stored_head(previous, model.config)}
    save_model(out, model, draft.tokenizer, extra_files, projection_file(model.config))

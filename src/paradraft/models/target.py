"""The target: prefill, forward(draft), commit."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paradraft.core import Draft, Prompt, TargetOut, Verdict
from paradraft.models.causal_lm import CausalLM
from paradraft.models.generation import end_ids
from paradraft.ragged import to_lists
from paradraft.tree import with_root


class Target:
    """The model whose text is produced.

    The last committed token is never in the cache between rounds: it is read together with the
    draft, as the root of the tree. So the first round needs no special case.

    Args:
        lm: the model.
        tokenizer: its tokenizer.
    """

    def __init__(self, lm: CausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.request = 0
        """Counts the requests: there is one cache, so a new request ends the one before."""

    @property
    def capacity(self) -> int:
        """Most tokens, prompt included, that a row may have."""
        return self.lm.capacity

    @property
    def fewest_rows(self) -> int:
        """How few rows a batch may shrink to."""
        return self.lm.fewest_rows

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a text, as `generate` of `transformers` finds them."""
        return end_ids(self.lm.model.generation_config)

    def prefill(self, prompt: Prompt) -> None:
        """Reads the prompts, all but their last tokens.

        Raises:
            ValueError: a prompt is longer than the capacity, or the cache does not fit into memory.
        """
        self.request += 1
        self._root_B1 = self.lm.start(prompt)

    def forward(self, draft: Draft) -> TargetOut:
        """Reads the last committed tokens and the whole draft in one pass."""
        tokens = torch.cat([self._root_B1, draft.tokens], dim=1)
        return TargetOut(logits=self.lm.forward(tokens, with_root(draft.parents)), hidden={})

    def commit(self, verdict: Verdict) -> None:
        """Keeps the accepted path; the verdict's next token becomes the new root."""
        self.lm.accept_path([[0, *(node + 1 for node in path)] for path in to_lists(verdict.path)])
        self._root_B1 = verdict.tokens.gather(1, verdict.accepted[:, None])

    def keep_rows(self, rows: Tensor) -> None:
        """Forgets all rows of the batch but `rows`, `[b]` indices."""
        self.lm.keep_rows(rows)
        self._root_B1 = self._root_B1[rows]

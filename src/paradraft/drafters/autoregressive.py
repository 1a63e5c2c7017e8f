"""VSD: a small model drafts one token after the other (Leviathan et al. 2023; Chen et al. 2023).

Shape letters: B rows of a batch, M pending tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Draft, Prompt, Sampling, TargetOut, Verdict
from paradraft.models import pending
from paradraft.models.causal_lm import CausalLM
from paradraft.models.loading import Runtime, load_draft_lm, locate
from paradraft.models.target import Target
from paradraft.sampling import draw


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the draft model; "pocket" is the shipped one.
    """

    draft: str


class AutoregressiveDrafter:
    """K passes of a small causal LM.

    After a round its cache holds all committed tokens but the pending ones: the target's own
    token, and after a full acceptance also the last drafted token, which was never read.

    Args:
        lm: the draft model.
    """

    needs_hidden = ()
    can_run_ahead = False

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self._sampling = Sampling()
        self._pending_BM = torch.empty(0, 0, dtype=torch.long)
        self._committed_B = torch.empty(0, dtype=torch.long)

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        """Reads all but the last token of each prompt."""
        self._sampling = prompt.sampling
        self._pending_BM = self.lm.start(prompt)

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """Reads what is pending, then drafts token by token."""
        if self._pending_BM.shape[1] >= self.lm.width:
            self._pending_BM = self.lm.read_all_but_last(self._pending_BM)
        reading, drafted = self._pending_BM, list[Tensor]()
        self._committed_B = self.lm.lengths_B
        for _ in range(k):
            number_B = pending.count(reading)
            logits_B1V = self.lm.forward(reading, rows_BR=number_B[:, None] - 1)
            self.lm.keep(number_B)
            if not drafted:
                self._committed_B = self.lm.lengths_B
                self._pending_BM = self._pending_BM[:, :0]
            reading = draw(logits_B1V, self.lm.lengths_B[:, None], self._sampling)
            drafted.append(reading)
        return Draft.chain(torch.cat(drafted, dim=1)) if drafted else Draft.empty(len(reading), self.lm.device)

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        """Drops the rejected tokens from the cache; what it has not read becomes pending."""
        read_B = (self.lm.lengths_B - self._committed_B).minimum(verdict.accepted)
        self.lm.rewind(self._committed_B + read_B)
        self._pending_BM = pending.append(self._pending_BM, pending.drop_first(verdict.tokens, read_B))


def build(config: Config, target: Target, runtime: Runtime) -> AutoregressiveDrafter:
    """Loads the draft model.

    Raises:
        ValueError: it does not exist, or its vocabulary does not fit the target's.
    """
    return AutoregressiveDrafter(load_draft_lm(locate(config.draft, "draft"), target, runtime))

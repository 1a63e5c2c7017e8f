"""VSD: a small model drafts one token after the other (Leviathan et al. 2023; Chen et al. 2023).

Shape letters: B rows of a batch, M pending tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import Draft, Prompt, TargetOut, Tree, Verdict
from paradraft.drafting import assemble, candidates_needed
from paradraft.models.causal_lm import CausalLM
from paradraft.models.loading import load_draft_lm, locate
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampler import Candidates, Sampler, joined


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

    needs_hidden: tuple[int, ...] = ()
    can_run_ahead = False
    can_branch = True
    can_branch_aside = False
    _sampler: Sampler

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self._tree: Tree | None = None
        self._pending_BM = torch.empty(0, 0, dtype=torch.long)
        self._best_BK = torch.empty(0, 0, dtype=torch.long)
        self._committed_B = torch.empty(0, dtype=torch.long)

    def start(self, prompt: Prompt, out: TargetOut | None) -> None:
        """Remembers the prompts; they are read when a draft is wanted for the first time."""
        self._sampler, self._tree = Sampler(prompt), prompt.tree
        self.lm.clear(len(prompt.tokens))
        self._committed_B = self.lm.lengths_B
        self._pending_BM = prompt.tokens
        self._best_BK = prompt.tokens[:, :0]

    def propose(self, k: int, after: Draft | None = None) -> Draft:
        """Reads what is pending, then drafts token by token; a tree's side branches are the next best tokens."""
        self._committed_B = self.lm.lengths_B
        self._best_BK = self._pending_BM[:, :0]
        if k == 0:
            return Draft.empty(len(self._pending_BM), self.lm.device)
        if self._pending_BM.shape[1] >= self.lm.width:
            self._pending_BM = self.lm.read_all_but_last(self._pending_BM)
        reading, found = self._pending_BM, list[Candidates]()
        for depth in range(k):
            number_B = ragged.count(reading)
            logits_B1V = self.lm.forward(reading, rows_BR=number_B[:, None] - 1)
            self.lm.keep(number_B)
            if not found:
                self._committed_B = self.lm.lengths_B
                self._pending_BM = self._pending_BM[:, :0]
            found.append(self._sampler.candidates(logits_B1V, depth, candidates_needed(self._tree), self._best_BK))
            reading = found[-1].tokens[:, :, 0]
            self._best_BK = torch.cat([self._best_BK, reading], dim=1)
        return assemble(joined(found), self._tree, aside=0.0)

    def commit(self, verdict: Verdict, out: TargetOut) -> None:
        """Drops the rejected tokens from the cache; what it has not read becomes pending."""
        depth = min(self._best_BK.shape[1], verdict.path.shape[1])
        followed = verdict.tokens[:, :depth] == self._best_BK[:, :depth]
        read_B = (self.lm.lengths_B - self._committed_B).minimum(followed.cumprod(1).sum(1)).minimum(verdict.accepted)
        self.lm.rewind(self._committed_B + read_B)
        self._pending_BM = ragged.append(self._pending_BM, ragged.drop_first(verdict.tokens, read_B))
        self._sampler.commit(verdict)

    def keep_rows(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self._pending_BM, self._committed_B = self._pending_BM[rows], self._committed_B[rows]
        self._best_BK = self._best_BK[rows]
        self._sampler.keep_rows(rows)
        self.lm.keep_rows(rows)


def build(config: Config, target: Target, runtime: Runtime) -> AutoregressiveDrafter:
    """Loads the draft model.

    Raises:
        ValueError: it does not exist, or its vocabulary does not fit the target's.
    """
    return AutoregressiveDrafter(load_draft_lm(locate(config.draft, "draft"), target, runtime))

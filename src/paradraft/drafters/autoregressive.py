"""VSD: a small model drafts one token after the other (Leviathan et al. 2023; Chen et al. 2023).

Shape letters: B rows of a batch, M pending tokens, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.models.causal_lm import CausalLM, SavedRow
from paradraft.models.forward.cpu.tree import grow
from paradraft.models.loading import load_draft_lm, locate
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates, assemble, candidates_needed, joined
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT, Tree


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the draft model; "pocket" is the shipped one.
    """

    draft: str


class AutoregressiveDrafter(Drafter):
    """K passes of a small causal LM.

    After a round its cache holds all committed tokens but the pending ones: the target's own
    token, and after a full acceptance also the last drafted token, which was never read.

    Args:
        lm: the draft model.
    """

    branching = "spine"
    _sampler: Sampler

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self._tree: Tree | None = None
        self._pending: list[list[int]] = []
        self._best_BK = torch.empty(0, 0, dtype=torch.long)
        self._committed: list[int] = []

    @property
    def models(self) -> tuple[CausalLM, ...]:
        """The draft model."""
        return (self.lm,)

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Forgets all rows."""
        self._sampler, self._tree = Sampler(drafting=drafting, device=device), drafting.tree
        self.lm.start()
        self._committed, self._pending = [], []
        self._best_BK = torch.empty(0, 0, dtype=torch.long, device=device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Remembers the prompts; they are read when a draft is wanted for the first time."""
        self._sampler.join(requests)
        self.lm.join(len(requests))
        self._pending += [list(request.tokens) for request in requests]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads what is pending, then drafts token by token; a tree's side branches are the next best tokens."""
        device, k = self.lm.device, max(lengths)
        self._committed = self.lm.lengths
        self._best_BK = torch.empty(len(lengths), 0, dtype=torch.long, device=device)
        if k == 0:
            return Draft.empty(len(lengths), device)
        unread = [row if length else [] for row, length in zip(self._pending, lengths, strict=True)]
        if max(map(len, unread)) >= self.lm.width:
            unread = self.lm.prefill(unread).last
        reading, numbers = ragged.from_lists(unread, device), list(map(len, unread))
        last_B1 = upload([[max(number - 1, 0)] for number in numbers], device)
        lengths_B1 = upload(lengths, device)[:, None]
        found: list[Candidates] = []
        for depth in range(k):
            logits_B1V = self.lm.forward(reading, logit_rows=last_B1).logits
            self.lm.advance(numbers)
            if not found:
                self._committed, last_B1 = self.lm.lengths, torch.zeros_like(last_B1)
            found.append(self._sampler.candidates(logits_B1V, depth, candidates_needed(self._tree), self._best_BK))
            best_B1 = found[-1].tokens[:, :, 0].masked_fill(lengths_B1 <= depth, ABSENT)
            self._best_BK = torch.cat([self._best_BK, best_B1], dim=1)
            reading = best_B1.masked_fill(lengths_B1 <= depth + 1, ABSENT)
            numbers = [int(length > depth + 1) for length in lengths]
        self._pending = [[] if length else row for row, length in zip(self._pending, lengths, strict=True)]
        return assemble(joined(found), self._tree, aside=0.0, faster=grow)

    def commit(self, new: Committed) -> None:
        """Drops the rejected tokens from the cache; what it has not read becomes pending."""
        kept, unread = [], []
        guesses, committed = self._best_BK.tolist(), ragged.to_lists(new.tokens)
        for row, (best, tokens) in enumerate(zip(guesses, committed, strict=True)):
            followed = takewhile(lambda pair: pair[0] == pair[1], zip(best, tokens[:-1], strict=False))
            read = min(sum(1 for _ in followed), self.lm.lengths[row] - self._committed[row])
            kept.append(self._committed[row] + read)
            unread.append(tokens[read:])
        self.lm.rollback(kept)
        self._pending = ragged.joined(self._pending, unread)
        self._sampler.commit(new)

    def keep(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self._pending = [self._pending[row] for row in rows.tolist()]
        self._sampler.keep(rows)
        self.lm.keep(rows)

    def save(self, row: int, most: int) -> SavedRow:
        """What the cache holds of a row."""
        return self.lm.save(row, most)

    def restore(self, row: int, saved: SavedRow, shared: int) -> None:
        """Reads only what the cache of the other row did not hold."""
        known = self.lm.restore(row, saved, min(shared, len(self._pending[row]) - 1))
        self._pending[row] = self._pending[row][known:]


def build(config: Config, target: Target, runtime: Runtime) -> AutoregressiveDrafter:
    """Loads the draft model.

    Raises:
        ValueError: it does not exist, or its vocabulary does not fit the target's.
    """
    return AutoregressiveDrafter(load_draft_lm(locate(config.draft, "draft"), target, runtime))

"""VSD: a small draft model drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

With trained prompt tokens it drafts the same tokens in fewer passes (Chen et al. 2024, PPD, section 5.3).

Shape letters: B rows of a batch, M pending tokens, N guesses, R the last pending token and all guesses, A tokens that a
pass yields, K drafted tokens, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from paradraft import ragged
from paradraft.core import Committed, Draft, Drafting, Request
from paradraft.drafters.parts.draft_loading import load_draft_lm
from paradraft.drafters.parts.model_drafter import ModelDrafter, draft_one_by_one
from paradraft.drafters.parts.pending_tokens import PendingTokens, Windowed
from paradraft.formats.head import read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.prompt_tokens import PromptTokens, forward_with_probes
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, TargetFacts
from paradraft.parents import depths, depths_after, parents_of_chains, texts_before
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sampler import Sampler
from paradraft.sources.loading import locate
from paradraft.traits import Serving, Traits
from paradraft.tree import ABSENT
from paradraft.verify.match import accepted_path

SIZE, MOST_SIZE = 6, 512
"""Guesses and prompt tokens of a pass: default and maximum."""
PROMPTS = 3
"""Most prompt tokens used after a guess."""


@dataclass(frozen=True, kw_only=True)
class Config(Windowed):
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the draft model; "pocket" is the shipped one.
        prompts: folder of prompt tokens that `paradraft train ppd` trained for the draft model; None for none.
        size: with prompt tokens, most guesses and prompt tokens of a pass of the draft model; None for `SIZE`.
    """

    draft: str
    prompts: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is not None and not Path(self.prompts).is_dir():
            raise ValueError(f"prompts={self.prompts!r} is no folder: name one that `paradraft train ppd` has written")
        if self.size is not None and self.prompts is None:
            raise ValueError(f"size={self.size} is for prompt tokens: name their folder as prompts=, or leave it out")
        if self.size is not None and not 1 <= self.size <= MOST_SIZE:
            raise ValueError(f"size={self.size}: use 1 to {MOST_SIZE}")

    @property
    def drafter_class(self) -> type[AutoregressiveDrafter]:
        """The drafter class for these settings."""
        return AutoregressiveDrafter if self.prompts is None else PromptedDrafter


class AutoregressiveDrafter(ModelDrafter):
    """K passes of a small causal LM.

    After a round its cache holds all committed tokens but the pending ones: the target's own token, and after a full
    acceptance also the last drafted token, which was never read.
    """

    traits = Traits(
        label="VSD", words="an ordinary draft model", branching="spine", can_run_ahead=True, drafts_one_by_one=True
    )
    serving = Serving(vllm="draft_model", tensorrt="Draft_Target", role="draft")

    def __init__(self, lm: CausalLM, *, window: int | None = None) -> None:
        self._pending = PendingTokens(lm, window=window)
        super().__init__(lm, self._pending)
        self.models = (lm,)
        self._guessed: list[list[int]] = []
        """By row, the tokens drafted after the committed ones, along the best path."""
        self._committed: list[int] = []
        """By row, the number of committed tokens in the cache."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self._committed, self._guessed = [], []

    def reads(self, prompt: int) -> int:
        """See `Drafter`."""
        return self._pending.reads(prompt)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the pending tokens, then drafts token by token; a tree's side branches are the next best tokens.

        The tokens of `after` are read like pending ones, and dropped again with the drafted ones.
        """
        device, k = self.lm.device, max(lengths)
        self._committed, self._guessed = self.lm.cache.lengths, [[] for _ in lengths]
        if k == 0:
            return Draft.empty(len(lengths), device)
        sampler, unread = self._sampler, self._pending.rows
        if after is not None:
            self._guessed = ragged.to_lists(after.tokens)
            sampler, unread = sampler.after(self._guessed), ragged.joined(unread, self._guessed)
        unread = [row if length else [] for row, length in zip(unread, lengths, strict=True)]
        if max(map(len, unread)) >= self.lm.width:
            unread = self.lm.prefill(unread).last
        rows = zip(self.lm.cache.lengths, unread, self._guessed, lengths, strict=True)
        self._committed = [
            min(read + len(row), self.lm.capacity) - len(guessed) if length else read
            for read, row, guessed, length in rows
        ]
        draft, best_BK = draft_one_by_one(self.lm, sampler, self._tree, unread, lengths)
        self._pending.drop(lengths)
        self._guessed = ragged.joined(self._guessed, ragged.to_lists(best_BK))
        return draft

    def commit(self, new: Committed) -> None:
        """Drops the rejected tokens from the cache; committed tokens that it has not read become pending."""
        kept, unread = [], []
        for row, (best, tokens) in enumerate(zip(self._guessed, new.tokens, strict=True)):
            followed = takewhile(lambda pair: pair[0] == pair[1], zip(best, tokens[:-1], strict=False))
            read = min(sum(1 for _ in followed), self.lm.cache.lengths[row] - self._committed[row])
            kept.append(self._committed[row] + read)
            unread.append(tokens[read:])
        self.lm.cache.rollback(kept)
        self._pending.add(unread)
        self._sampler.commit(new)


class PromptedDrafter(AutoregressiveDrafter):
    """The same drafts in fewer passes: the draft model verifies its own guesses of the next tokens (PPD).

    A drawn token depends only on the text and the position, so a guess that equals it is as good as drawn. The first
    pass of a round has no guesses. Drafts are chains.
    """

    traits = replace(AutoregressiveDrafter.traits, branching="chain", can_run_ahead=False)

    def __init__(self, lm: CausalLM, prompts: PromptTokens, size: int, *, window: int | None = None) -> None:
        super().__init__(lm, window=window)
        self._prompts, self._size, self._shapes = prompts, size, prompts.best(size)

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self._prompts.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """See `AutoregressiveDrafter`."""
        super().join(requests, prompt)
        self._prompts.join(len(requests))

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        super().keep(rows)
        self._prompts.keep(rows)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the pending tokens, then drafts until each row has its length."""
        device, B, K = self.lm.device, len(lengths), max(lengths)
        self._committed = self.lm.cache.lengths
        # One more column, for tokens to discard.
        drafted = Draft.chain(torch.full((B, K + 1), ABSENT, device=device))
        wanted_B, lengths_B = upload(lengths, device), torch.zeros(B, dtype=torch.long, device=device)
        unread = self._pending.of(lengths)
        if K and max(map(len, unread)) + self._size > self.lm.width:
            unread = self.lm.prefill(unread).last
        self._prompts.forget()
        is_first = True
        while any(unread):
            sampler = self._sampler.after(ragged.to_lists(drafted.tokens[:, :K]))
            guesses = self._guess(sampler, wanted_B - lengths_B)
            candidates, paths_BR = self._read(sampler, unread, guesses)
            drafted = _added(drafted, candidates, paths_BR, lengths_B)
            lengths_B += (paths_BR != ABSENT).sum(1)
            if is_first:
                self._committed, is_first = self.lm.cache.lengths, False
            last_B1 = drafted.tokens.gather(1, (lengths_B - 1).clamp(min=0)[:, None])
            unread = ragged.to_lists(last_B1.masked_fill((lengths_B >= wanted_B)[:, None], ABSENT))
        self._pending.drop(lengths)
        drafted = drafted.where((drafted.tokens != ABSENT) & (torch.arange(K + 1, device=device) < K))
        self._guessed = ragged.to_lists(drafted.tokens)
        return drafted

    def _guess(self, sampler: Sampler, lacking_B: Tensor) -> Draft:
        """Guesses of the next tokens, and prompt tokens, for rows that lack more than one token."""
        logits_BPV = self._prompts.logits
        depths_1P = torch.arange(logits_BPV.shape[1], device=lacking_B.device)[None]
        candidates = sampler.guesses_at(logits_BPV, depths_1P, self._shapes.ranks)
        guesses = self._prompts.draft(self._shapes, candidates, lacking_B > 1)
        # A guess of depth d yields the token d + 2 of this pass.
        return guesses.where((guesses.tokens != ABSENT) & (depths(guesses.parents) < lacking_B[:, None] - 1))

    def _read(self, sampler: Sampler, unread: list[list[int]], guesses: Draft) -> tuple[Candidates, Tensor]:
        """Reads tokens and the guesses after them, and keeps the guesses that the draft model draws itself.

        Returns candidates after each of them, and indices `[B, A]` of those that continue the draft, then `ABSENT`.
        """
        reading_BM = ragged.from_lists(unread, self.lm.device)
        B, M = reading_BM.shape
        last_B1 = upload([[max(len(row) - 1, 0)] for row in unread], self.lm.device)
        N = guesses.tokens.shape[1]
        rows_BR = torch.cat([last_B1, torch.arange(M, M + N, device=last_B1.device).expand(B, -1)], dim=1)
        tokens_BM = torch.cat([reading_BM, guesses.tokens], dim=1)
        parents_BM = torch.cat([parents_of_chains(B, M, last_B1.device), rows_BR.gather(1, guesses.parents + 1)], dim=1)
        assert guesses.probes is not None
        out, probes = forward_with_probes(self.lm.forward, guesses.probes, tokens_BM, parents_BM, rows_BR)
        texts = texts_before(guesses.tokens, guesses.parents) if sampler.reads_text else None
        candidates = sampler.candidates_at(out.logits, depths_after(guesses.parents), 1, texts)
        parts = (guesses.tokens, guesses.parents, candidates.tokens[:, :, 0])
        rows = zip(unread, *(part.tolist() for part in parts), strict=True)
        paths = [accepted_path(*guessed) if row else [] for row, *guessed in rows]
        self.lm.cache.accept_path(
            [[*range(len(row)), *(M + node for node in path)] for row, path in zip(unread, paths, strict=True)]
        )
        last = [path[-1] if path else -1 for path in paths]
        self._prompts.commit(probes.after(upload(last, last_B1.device)))
        taken = [[0, *(node + 1 for node in path)] if row else [] for row, path in zip(unread, paths, strict=True)]
        return candidates, ragged.from_lists(taken, last_B1.device)


def _added(drafted: Draft, candidates: Candidates, paths_BA: Tensor, lengths_B: Tensor) -> Draft:
    """Writes the candidates at `paths_BA` after each row's `lengths_B` tokens; the last column takes absent ones."""
    last = drafted.tokens.shape[1] - 1
    is_none_BA = paths_BA == ABSENT
    columns_BA = lengths_B[:, None] + torch.arange(paths_BA.shape[1], device=paths_BA.device)
    columns_BA = columns_BA.masked_fill(is_none_BA, last).clamp(max=last)
    rows_B1, which_BA = torch.arange(len(paths_BA), device=paths_BA.device)[:, None], paths_BA.clamp(min=0)

    def put(before: Tensor | None, new: Tensor | None) -> Tensor | None:
        if new is None:
            return before
        if before is None:
            before = new.new_zeros(len(new), last + 1, *new.shape[2:])
        return before.index_put((rows_B1, columns_BA), new[rows_B1, which_BA])

    tokens = put(drafted.tokens, candidates.tokens[:, :, 0])
    assert tokens is not None
    return Draft(
        tokens=tokens,
        parents=drafted.parents,
        probs=put(drafted.probs, None if candidates.probs is None else candidates.probs[:, :, 0]),
        confidence=put(drafted.confidence, candidates.confidence),
    )


def build(config: Config, target: Target | TargetFacts, runtime: Runtime) -> AutoregressiveDrafter:
    """Loads the draft model, and its prompt tokens if there are any."""
    size = config.size or SIZE
    width = 0 if config.prompts is None else size + 2  # beside pending tokens
    lm = load_draft_lm(locate(config.draft, "draft"), target, runtime, width=width)
    if config.prompts is None:
        return AutoregressiveDrafter(lm, window=config.draft_window)
    head = read_head(config.prompts, "ppd", lm.model.config)
    prompts = min(head.setting("prompt_tokens", int), PROMPTS)
    return PromptedDrafter(lm, PromptTokens(lm, head, prompts), size, window=config.draft_window)

"""A draft model with other tokens than the target: it reads the text in its own, and its drafts are translated.

The drafter of the draft model reads the settled tokens of a text, and before each draft those of its last word, which
more text may change, as a drafter that runs ahead reads its own unverified draft. It drafts the likeliest tokens, which
the target's tokenizer turns into the target's. Exact under every rule, because verification is on these (Timor et al.
2025, 2502.05202, Algorithm 3, which tokenizes the draft together with the text before it, too).

Shape letters: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.models.architectures import context_of
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, TargetFacts
from paradraft.sources.load_plan import Checkpoint, wider
from paradraft.sources.loading import locate
from paradraft.sources.target_loading import facts_of
from paradraft.text.chat_template import end_of_turn
from paradraft.text.translation import LONGEST, Translation, Translator
from paradraft.traits import Traits
from paradraft.tree import ABSENT

MOST_BYTES = 4
"""Of a character in UTF-8, each a token at worst."""
MORE = 2
"""Most tokens of the draft model for one of the target, for which there is room."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: Hugging Face id, folder or GGUF file of the draft model.
        of: the drafter of the draft model: autoregressive or pard.
    """

    draft: str
    of: str = "autoregressive"

    @property
    def drafter_class(self) -> type[TranslatedDrafter]:
        """The drafter class for these settings."""
        from paradraft.drafters import traits_of

        return TranslatedDrafter if traits_of(self.of).drafts_one_by_one else TranslatedParallelDrafter

    def __post_init__(self) -> None:
        from paradraft.drafters import drafter_names, traits_of

        able = [name for name in drafter_names() if traits_of(name).can_run_ahead]
        if self.of not in able:
            raise ValueError(f"of={self.of!r}: use {' or '.join(able)}")


class TranslatedDrafter(Drafter):
    """Translates for another drafter, which is built for a target with the tokens of its draft model.

    Args:
        part: it can run ahead.
        capacity: most tokens of a row that `part` has room for.
    """

    traits = Traits(words="a draft model with other tokens", has_own_tokens=True, drafts_one_by_one=True)

    def __init__(self, part: Drafter, translator: Translator, *, capacity: int) -> None:
        self.part, self._translator, self._capacity = part, translator, capacity
        self.models, self.max_k = part.models, part.max_k
        self._rows: list[Translation] = []
        self._has_unread: list[bool] = []
        """By row, whether `part` has settled tokens that it has not read."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self.part.start(replace(drafting, draws="likeliest", tree=None, wants_confidence=False), device)
        self._device, self._rows, self._has_unread = device, [], []

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Translates the prompts."""
        rows = [self._translator.begin() for _ in requests]
        tokens = [list(row.begin(request.tokens)) for row, request in zip(rows, requests, strict=True)]
        self._rows, self._has_unread = self._rows + rows, self._has_unread + [True] * len(rows)
        theirs = [Request(id=request.id, tokens=read) for request, read in zip(requests, tokens, strict=True)]
        self.part.join(theirs, Committed(tokens=tokens))

    def catch_up(self, rows: Sequence[int], most: int) -> dict[int, int]:
        """See `Drafter`; a row without room is not read."""
        return self.part.catch_up([row for row in rows if self._room(row) > 0], most)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Drafts after the last word, and translates; nothing for rows without room, or without a token to read."""
        assert after is None
        tails = [row.tail if length else [] for row, length in zip(self._rows, lengths, strict=True)]
        depths = [
            max(min(length, self._room(row)), 0) if self._has_unread[row] or tails[row] else 0
            for row, length in enumerate(lengths)
        ]
        drafted = self.part.propose(depths, Draft.of_lists(tails, device=self._device)).lists[0]
        self._has_unread = [
            has_unread and not depth for has_unread, depth in zip(self._has_unread, depths, strict=True)
        ]
        translated = [
            row.translated([token for token in tokens[:depth] if token != ABSENT])[:length] if depth else []
            for row, tokens, depth, length in zip(self._rows, drafted, depths, lengths, strict=True)
        ]
        return Draft.of_lists(translated, device=self._device)

    def _room(self, row: int) -> int:
        """Most tokens of a draft."""
        return self._capacity - len(self._rows[row].settled) - len(self._rows[row].tail) - 1

    def commit(self, new: Committed) -> None:
        """Translates the committed tokens."""
        settled = [row.add(tokens) for row, tokens in zip(self._rows, new.tokens, strict=True)]
        self._has_unread = [
            has_unread or bool(tokens) for has_unread, tokens in zip(self._has_unread, settled, strict=True)
        ]
        self.part.commit(Committed(tokens=settled))

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._rows = [self._rows[row] for row in rows.tolist()]
        self._has_unread = [self._has_unread[row] for row in rows.tolist()]
        self.part.keep(rows)

    def save(self, row: int, most: int) -> Any:
        """The state of the draft model's row, and its tokens."""
        settled = self._rows[row].settled
        return self.part.save(row, len(settled)), list(settled)

    def restore(self, row: int, saved: Any, shared: int) -> None:
        """Reuses what both texts have in common in the draft model's tokens."""
        state, tokens = saved
        pairs = zip(tokens, self._rows[row].settled, strict=False)
        self.part.restore(row, state, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def close(self) -> None:
        """See `Drafter`."""
        self.part.close()


class TranslatedParallelDrafter(TranslatedDrafter):
    """The same for a drafter that drafts in one pass."""

    traits = replace(TranslatedDrafter.traits, drafts_one_by_one=False)


def build(config: Config, target: Target | TargetFacts, runtime: Runtime) -> TranslatedDrafter:
    """Loads the draft model with its own tokenizer."""
    from paradraft.drafters import load_drafter, serving_of

    checkpoint = Checkpoint.at(locate(config.draft, serving_of(config.of).role or config.of))
    capacity = min(context_of(checkpoint.config), MORE * target.capacity)
    theirs = facts_of(checkpoint, capacity=capacity)
    ends = (end_of_turn(target.tokenizer), target.tokenizer.eos_token_id, *sorted(target.eos_ids))
    end = next((token for token in ends if token in target.eos_ids), None)
    translator = Translator(
        target=target.tokenizer, draft=theirs.tokenizer, ends={} if end is None else dict.fromkeys(theirs.eos_ids, end)
    )
    with_tail = wider(runtime, MOST_BYTES * LONGEST)
    part = load_drafter(config.of, theirs, draft=config.draft, runtime=with_tail)
    return config.drafter_class(part, translator, capacity=capacity)

"""Forced tokens: drafts what the grammar of a request leaves no choice about, such as the keys of a JSON schema.

No model: a logits processor with the method `forced` is asked for the tokens after the answer so far
(`paradraft.sampling_params.ForcingProcessor`). SGLang's jump-forward decoding appends forced text unread; here the
target verifies it as any other draft, because the same text can be split into tokens in several ways. Requests without
such a processor draft nothing; in a union, as in `forced+ngram`, the other drafter then drafts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from paradraft.core import Committed, Drafting, Request
from paradraft.drafters.parts.estimating import Estimating, Node, at_odds, chain_of
from paradraft.drafters.parts.text_drafter import TextDrafter
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling_params import ForcingProcessor
from paradraft.traits import Traits

SURE, LAST = 0.99, 0.75
"""Chance of a forced token, and of the last one of a chain, which may be part of a longer token: in 20 JSON answers of
Qwen2.5-Coder 0.5B 634 of 634 were right, and 109 of 146 last ones (docs/decisions.md, 110)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """No settings."""


class ForcedDrafter(TextDrafter, Estimating):
    """Drafts what the processors of each row force; `vocab_size` is the target's."""

    traits = Traits(words="what a grammar forces", needs_grammar=True, estimates=True)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        super().start(drafting, device)
        self._requests: list[Request] = []

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Stores the prompts and the processors."""
        super().join(requests, prompt)
        self._requests += requests

    def keep(self, rows: Tensor) -> None:
        """Drops the other rows."""
        super().keep(rows)
        self._requests = [self._requests[row] for row in rows.tolist()]

    def grow(self, lengths: Sequence[int]) -> list[list[Node]]:
        """A chain of the tokens that follow each answer."""
        rows = zip(self._requests, self.texts, lengths, strict=True)
        drafts = [
            forced_tokens(request, text[len(request.tokens) - request.answered :], k, self.vocab_size) if k else []
            for request, text, k in rows
        ]
        return [
            chain_of(tokens, [at_odds(chance, self.worth.factor) for chance in chances(len(tokens), k)])
            for tokens, k in zip(drafts, lengths, strict=True)
        ]


def chances(count: int, most: int) -> list[float]:
    """Those of a chain of forced tokens; one shorter than asked for ends where the grammar leaves a choice."""
    return [SURE] * count if count in (0, most) else [*[SURE] * (count - 1), SURE * LAST]


def forced_tokens(request: Request, answer: list[int], most: int, vocab_size: int) -> list[int]:
    """At most `most` tokens from the first processor that forces any; ids of the target only.

    An exception of a processor is a warning, because decoding without drafts would not have met it.
    """
    for processor in request.sampling.processors:
        if isinstance(processor, ForcingProcessor):
            try:
                tokens = processor.forced(answer, most)[:most]
                known = list(takewhile(lambda token: 0 <= token < vocab_size, tokens))
            except Exception as error:
                name = type(processor).__name__
                warnings.warn(f"{name}.forced: {type(error).__name__}, so nothing is drafted: {error}", stacklevel=2)
                continue
            if known:
                return known
    return []


def build(config: Config, target: Target, runtime: Runtime) -> ForcedDrafter:
    """Builds the drafter; runtime is not used."""
    return ForcedDrafter(target.vocab_size)

"""Early exit: the target's first layers, its final norm and its output head draft token by token.

There is no draft model and no second KV cache: the drafter's pass ends after E layers of the target, and writes their
keys and values into the target's slots after the committed tokens, where the pass that verifies the draft writes over
them. The method, and models trained for it (with layer dropout and a loss at every layer), are LayerSkip's (Elhoushi et
al. 2024); Kangaroo (Liu et al. 2024) trains an adapter before the head instead. Verification reads the draft with all
layers: it does not reuse the states of the first ones, as both papers do.

A drafted token costs E layers and the head. So it pays for targets trained with early exits, such as
facebook/layerskip-llama3.2-1B; the first layers of other models agree with the whole too rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.drafters.parts.model_drafter import draft_one_by_one
from paradraft.models.cached_rows import RowsView
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling.sampler import Sampler
from paradraft.traits import Traits
from paradraft.wording import number_of


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        layer: E, the target's layers that draft; None for a third of them.
    """

    layer: int | None = None

    def __post_init__(self) -> None:
        if self.layer is not None and self.layer < 1:
            raise ValueError(f"layer={self.layer}: use at least 1, or leave it out for a third of the target's layers")


class ExitDrafter(Drafter):
    """K passes of a view of the target.

    Args:
        view: of the target's first layers, see `CausalLM.view`.
    """

    traits = Traits(words="the target's first layers", branching="spine", drafts_one_by_one=True)

    def __init__(self, view: CausalLM) -> None:
        assert isinstance(view.cache, RowsView)
        self.lm, self._cache, self.models = view, view.cache, (view,)

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._sampler, self._tree = Sampler(drafting=drafting, device=device, faster=self.lm.sampling), drafting.tree
        self._last: list[int] = []
        """By row, the last committed token, which the target has not read either."""
        self.lm.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows; the target has read their prompts."""
        self._sampler.join(requests)
        self._last += [request.tokens[-1] for request in requests]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the last committed token after those in the target's cache, then drafts token by token."""
        if not any(lengths):
            return Draft.empty(len(lengths), self.lm.device)
        self._cache.follow()
        unread = [[token] if length else [] for token, length in zip(self._last, lengths, strict=True)]
        return draft_one_by_one(self.lm, self._sampler, self._tree, unread, lengths)[0]

    def commit(self, new: Committed) -> None:
        """See `Drafter`."""
        self._last = [tokens[-1] for tokens in new.tokens]
        self._sampler.commit(new)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._last = [self._last[row] for row in rows.tolist()]
        self._sampler.keep(rows)


def build(config: Config, target: Target, runtime: Runtime) -> ExitDrafter:
    """The drafter for a target, whose weights it shares."""
    most: int = target.lm.model.config.num_hidden_layers
    if config.layer is not None and config.layer > most:
        raise ValueError(f"layer={config.layer}: the target has {number_of(most, 'layer')}; use 1 to {most}")
    return ExitDrafter(target.lm.view(config.layer or max(most // 3, 1)))

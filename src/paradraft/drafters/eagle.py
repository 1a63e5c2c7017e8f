"""EAGLE: one decoder layer on the target's states drafts one token after the other (Li et al. 2024, section 3.1).

The layer reads, for each token, its embedding and a state, joined by a linear layer: for a committed token the state
from which the target predicted it, for a drafted one what the layer returned in its place. What it returns goes through
the target's output head.

Shape letters: B rows of a batch, K drafted tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.draft_layers import DraftLayers, LayersDrafter
from paradraft.models.loading import locate
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the layer, see `paradraft.formats.head`; "pocket" is the shipped one.
    """

    draft: str


class EagleDrafter(LayersDrafter):
    """K passes of the layer.

    Args:
        target: whose tokens and states are read.
        head: the checkpoint.
        runtime: the target's.
    """

    branching = "spine"

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        width = target.model.config.hidden_size
        self._join = target.linear(head.tensor("fc.weight", width, 2 * width), head.tensor("fc.bias", width))
        super().__init__(DraftLayers(target, head, runtime, joined=self._joined))

    def _joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        return self._join(torch.cat([embeddings.to(states.dtype), states], dim=-1))

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads what is not read, then drafts token by token; a tree's side branches are the next best tokens."""
        return self.one_by_one(lengths)


def build(config: Config, target: Target, runtime: Runtime) -> EagleDrafter:
    """Loads the layer.

    Raises:
        ValueError: there is none, or it was trained for another target.
    """
    head = read_head(locate(config.draft, "eagle"), "eagle", target.lm.model.config)
    return EagleDrafter(target.lm, head, runtime)

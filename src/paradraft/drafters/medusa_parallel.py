"""ParallelSpec inside Medusa: one decoder layer in place of the heads drafts K tokens in one pass (Xiao et al. 2024).

The layer reads the embeddings of the committed tokens, or these plus the states from which the target predicted them,
then K - 1 masks (sections 4.1 and 4.3). Its outputs for the last token and for each mask go through a norm and the
target's output head. The paper does not say which of the two it reads; the checkpoint does.

Shape letters: B rows of a batch, K drafted tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters.parts.draft_layers import DraftLayers, Masks, target_layers
from paradraft.drafters.parts.layers_drafter import LayersDrafter
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import locate


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        draft: Hugging Face id or folder of the layer, see `paradraft.formats.head`; "pocket" is the shipped one.
    """

    draft: str


class MedusaParallelDrafter(LayersDrafter):
    """One pass over tokens and masks."""

    branching = "tree"

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        layers = target_layers(head) if head.setting("reads", str, "embedding", "state") == "state" else ()
        self._scale = head.setting("embedding_scale", float)
        super().__init__(DraftLayers(target, head, runtime, layers=layers, joined=self._joined))
        self.masks = Masks(head, target.device)
        self.max_k = self.masks.max_k
        self.correct_with(head)

    def _joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """The layer's input `[…, D]`; `states` are `[…, 0]` if it reads only embeddings."""
        scaled = self._scale * embeddings
        return scaled + states if states.shape[-1] else scaled

    def _masks(self, states_BD: Tensor, k: int) -> Tensor:
        return self._joined(*self.masks(states_BD, k))

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the pending tokens and masks, and draws all tokens."""
        return self.in_one_pass(lengths, self._masks)


def build(config: Config, target: Target, runtime: Runtime) -> MedusaParallelDrafter:
    """Loads the layer."""
    head = read_head(locate(config.draft, "medusa_parallel"), "medusa_parallel", target.lm.model.config)
    return MedusaParallelDrafter(target.lm, head, runtime)

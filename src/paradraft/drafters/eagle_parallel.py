"""ParallelSpec inside EAGLE: one decoder layer on the target's hidden states drafts K tokens in one pass (Xiao et al.
2024).

The layer reads, for each committed token, its embedding and the state from which the target predicted it, joined by a
linear layer (EAGLE, Li et al. 2024, section 3.1), then K - 1 masks (ParallelSpec, sections 4.1 and 4.3). Its outputs
for the last token and for each mask go through the target's output head.

Masks have an embedding per position of the draft, or one for all. The paper does not define the state of a mask: it is
a learned vector for all masks, as in P-EAGLE, or the state before the last committed token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.drafters.parts.draft_layers import target_layers
from paradraft.drafters.parts.model_drafter import Config
from paradraft.drafters.parts.parallel_layers import ParallelLayersDrafter
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import locate
from paradraft.traits import INSTEAD, Serving


class EagleParallelDrafter(ParallelLayersDrafter):
    """One pass over tokens with their states, and masks."""

    serving = Serving(
        refusal="vLLM's parallel EAGLE heads are EAGLE-3's, which read embedding and state side by side, each after a "
        f"norm of its own, and know one mask: {INSTEAD}, or eagle with for_vllm=true"
    )

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        width = target.model.config.hidden_size
        self._join = target.linear(head.tensor("fc.weight", width, 2 * width), head.tensor("fc.bias", width))
        super().__init__(target, head, runtime, layers=target_layers(head))

    def joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """A linear layer on both, side by side."""
        return self._join(torch.cat([embeddings.to(states.dtype), states], dim=-1))


def build(config: Config, target: Target, runtime: Runtime) -> EagleParallelDrafter:
    """Loads the layer."""
    head = read_head(locate(config.draft, "eagle_parallel"), "eagle_parallel", target.lm.model.config)
    return EagleParallelDrafter(target.lm, head, runtime)

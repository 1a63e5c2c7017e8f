"""ParallelSpec inside Medusa: one decoder layer in place of the heads drafts K tokens in one pass (Xiao et al. 2024).

The layer reads the embeddings of the committed tokens, or these plus the states from which the target predicted them,
then K - 1 masks (sections 4.1 and 4.3). Its outputs for the last token and for each mask go through a norm and the
target's output head. The paper does not say which of the two it reads; the checkpoint does.
"""

from __future__ import annotations

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


class MedusaParallelDrafter(ParallelLayersDrafter):
    """One pass over tokens and masks."""

    serving = Serving(
        refusal=f"vLLM has no drafter whose layers read masks after tokens and the target's last states: {INSTEAD}"
    )

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        self._scale = head.setting("embedding_scale", float)
        reads_states = head.setting("reads", str, "embedding", "state") == "state"
        super().__init__(target, head, runtime, layers=target_layers(head) if reads_states else ())

    def joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Their sum; `states` are `[…, 0]` if the layer reads only embeddings."""
        scaled = self._scale * embeddings
        return scaled + states if states.shape[-1] else scaled


def build(config: Config, target: Target, runtime: Runtime) -> MedusaParallelDrafter:
    """Loads the layer."""
    head = read_head(locate(config.draft, "medusa_parallel"), "medusa_parallel", target.lm.model.config)
    return MedusaParallelDrafter(target.lm, head, runtime)

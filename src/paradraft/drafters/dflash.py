"""Block drafters on the target's states: DFlash (Chen et al. 2026) and its causal relatives (JetSpec).

Layers of a separate cache draft a block of masks in one pass after keys and values made of the target's states, see
`BlockLayers`. A drafter that is trained here has a causal block whose first token, the anchor, drafts too; published
folders of DFlash have one whose tokens see each other, and an anchor that drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from paradraft.core import Draft
from paradraft.drafters.parts.block_layers import BlockLayers
from paradraft.drafters.parts.draft_head import draft_head
from paradraft.drafters.parts.model_drafter import Config, ModelDrafter
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.drafters.parts.path_heads.loading import load_path_head
from paradraft.formats.head import Head
from paradraft.formats.published_block import read_block
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import locate
from paradraft.traits import Serving, Traits


class DFlashDrafter(ModelDrafter):
    """One pass over a block."""

    traits = Traits(label="DFlash", words="a block of masks on the target's states", branching="tree")
    serving = Serving(vllm="dspark", as_exported=True, one_k=True, passes=" in one pass.")

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        self._layers = BlockLayers(target, head, runtime)
        super().__init__(self._layers.lm, self._layers)
        self.models = (self.lm,)
        settings = self._layers.settings
        self.hidden_layers = settings.target_layers
        self.max_k = None if settings.causal else settings.k
        self._head = draft_head(target, head)
        self._path_head = load_path_head(target, head, self._head)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Runs a block, and draws all tokens."""
        if max(lengths) == 0:
            return Draft.empty(len(lengths), self.lm.device)
        states_BKD = self._layers.outputs(lengths)
        logits_BKV = self._head(states_BKD)
        return draft_of_pass(self._sampler, self._tree, logits_BKV, self._path_head, states_BKD, self._layers.anchors)


def build(config: Config, target: Target, runtime: Runtime) -> DFlashDrafter:
    """Loads the layers."""
    head = read_block(locate(config.draft, "dflash"), "dflash", target.lm.model.config)
    return DFlashDrafter(target.lm, head, runtime)

"""Base of ParallelSpec's drafters: draft layers read masks after the tokens, and draft all tokens in one pass.

Shape letters: B rows of a batch, K drafted tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters.parts.draft_head import draft_head
from paradraft.drafters.parts.draft_layers import DraftLayers, Masks
from paradraft.drafters.parts.model_drafter import ModelDrafter
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.drafters.parts.path_heads.loading import load_path_head
from paradraft.formats.head import Head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.traits import Traits


class ParallelLayersDrafter(ModelDrafter):
    """One pass over tokens and masks.

    Args:
        layers: target layers whose states are read.
    """

    traits = Traits(branching="tree")

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime, *, layers: Sequence[int]) -> None:
        self._layers = DraftLayers(target, head, runtime, layers=layers, joined=self.joined)
        super().__init__(self._layers.lm, self._layers)
        self.models = (self.lm,)
        self.hidden_layers = self._layers.layers
        self._target, self._masks = target, Masks(head, target.device)
        self.max_k = self._masks.max_k
        self._head = draft_head(target, head)
        self._path_head = load_path_head(target, head, self._head)

    def joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """The layers' input `[…, D]` from embeddings and states of tokens or masks, see `DraftLayers`."""
        raise NotImplementedError

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the pending tokens and masks, and draws all tokens."""
        if max(lengths) == 0:
            return Draft.empty(len(lengths), self._target.device)
        states_BKD = self._layers.outputs(lengths, self._masks)
        logits_BKV = self._head(states_BKD)
        return draft_of_pass(self._sampler, self._tree, logits_BKV, self._path_head, states_BKD, self._layers.anchors)

"""EAGLE: one decoder layer on the target's hidden states drafts token by token (Li et al. 2024, section 3.1).

The layer reads, for each token, its embedding and a state, joined by a linear layer: for a committed token the state
from which the target predicted it, for a drafted one the layer's own output instead. The output goes through the
target's output head.

A tree with a budget grows as in EAGLE-2 (Li et al. 2024b, section 4): at each depth the likeliest nodes are expanded,
each after its own path, and of all nodes the likeliest are drafted.

Shape letters: B rows of a batch, K drafted tokens, V vocabulary, D hidden size, W nodes that are expanded at a
depth, X all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.drafters.parts.draft_head import draft_head
from paradraft.drafters.parts.draft_layers import DraftLayers, target_layers
from paradraft.drafters.parts.model_drafter import Config, ModelDrafter
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, gathered
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates, assemble, joined
from paradraft.sampling.expansion import expanded
from paradraft.sources.loading import locate
from paradraft.traits import Serving, Traits
from paradraft.tree import ABSENT


class EagleDrafter(ModelDrafter):
    """K passes of the layer."""

    traits = Traits(branching="tree")
    serving = Serving(
        vllm="eagle",
        as_exported=True,
        refusal="vLLM's EAGLE heads join embedding and state without a bias, are Mistral's layers, and never read the "
        "first token of a text: train it with for_vllm=true",
        passes=", one a pass of its layers.",
    )

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        width = target.model.config.hidden_size
        for_vllm = head.config.get("for_vllm") is True
        bias = None if for_vllm else head.tensor("fc.bias", width)
        self._join = target.linear(head.tensor("fc.weight", width, 2 * width), bias)
        self.layers = DraftLayers(
            target, head, runtime, layers=target_layers(head), joined=self._joined, for_vllm=for_vllm
        )
        self._head = draft_head(target, head)
        super().__init__(self.layers.lm, self.layers)
        self.models = (self.lm,)
        self.hidden_layers = self.layers.layers

    def _joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        return self._join(torch.cat([embeddings.to(states.dtype), states], dim=-1))

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the pending tokens, then drafts token by token; trees depth by depth."""
        able = self.layers.able(lengths)
        if self._tree is not None and max(able):
            return self._grown(able)
        draft = self._one_by_one(able)
        if able == list(lengths):
            return draft
        is_able_B1 = upload(able, self.layers.target.device)[:, None] > 0
        return replace(draft, tokens=draft.tokens.masked_fill(~is_able_B1, ABSENT))

    def _one_by_one(self, lengths: Sequence[int]) -> Draft:
        """A pass per token, on the state that the previous one returned."""
        layers, device, k = self.layers, self.layers.target.device, max(lengths)
        if k == 0:
            return Draft.empty(len(lengths), device)
        lengths_B1 = upload(lengths, device)[:, None]
        states_B1D, committed = layers.outputs(lengths), self.lm.cache.lengths
        best_BK = torch.empty(len(lengths), 0, dtype=torch.long, device=device)
        candidates: list[Candidates] = []
        for depth in range(k):
            if candidates:
                wanted_B1 = best_BK[:, -1:].masked_fill(lengths_B1 <= depth, ABSENT)
                states_B1D = layers.step(wanted_B1, states_B1D)
            logits_B1V = self._head(states_B1D)
            candidates.append(self._sampler.candidates(logits_B1V, depth, 1, best_BK))
            best_BK = torch.cat([best_BK, candidates[-1].tokens[:, :, 0]], dim=1)
        self.lm.cache.rollback(committed)
        return assemble(joined(candidates), None, aside=0.0)

    def _grown(self, lengths: Sequence[int]) -> Draft:
        layers, target, k = self.layers, self.layers.target, max(lengths)
        states_BWD = layers.outputs(lengths)
        is_wanted_B1 = upload(lengths, target.device)[:, None] > 0
        present_B1 = torch.where(is_wanted_B1, 0, ABSENT)
        before_BX, vectors_BXD = present_B1[:, :0], states_BWD[:, :0]

        def expand(depth: int, new_BW: Tensor, slot_BW: Tensor) -> Tensor:
            nonlocal states_BWD, before_BX, vectors_BXD
            vectors_BWD = layers.joined(target.embed(new_BW), gathered(states_BWD, slot_BW))
            last = before_BX.shape[1] - states_BWD.shape[1]  # index of the first expanded node of the previous depth
            before_BX = torch.cat([before_BX, slot_BW + last if depth > 1 else torch.full_like(slot_BW, -1)], dim=1)
            vectors_BXD = torch.cat([vectors_BXD, vectors_BWD], dim=1)
            read_BXD = layers.look(present_B1.expand_as(before_BX), before_BX, vectors_BXD)
            states_BWD = read_BXD[:, -new_BW.shape[1] :]
            return self._head(states_BWD)

        widest = max(self.lm.width // k, 1)
        draft = expanded(self._sampler, self._tree, self._head(states_BWD), expand, k=k, widest=widest)
        return replace(draft, tokens=draft.tokens.masked_fill(~is_wanted_B1, ABSENT))


def build(config: Config, target: Target, runtime: Runtime) -> EagleDrafter:
    """Loads the layer."""
    head = read_head(locate(config.draft, "eagle"), "eagle", target.lm.model.config)
    return EagleDrafter(target.lm, head, runtime)

"""EAGLE: one decoder layer on the target's states drafts one token after the other (Li et al. 2024, section 3.1).

The layer reads, for each token, its embedding and a state, joined by a linear layer: for a committed token the state
from which the target predicted it, for a drafted one what the layer returned in its place. What it returns goes through
the target's output head.

A tree that grows to a budget grows as in EAGLE-2 (Li et al. 2024b, section 4): from depth to depth the likeliest nodes
are expanded, each after its own tokens, and of all nodes the likeliest are drafted.

Shape letters: B rows of a batch, K drafted tokens, D hidden size, W nodes that are expanded at a depth, X all of these,
C candidates after a node, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Draft
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.draft_layers import DraftLayers
from paradraft.models.layers_drafter import LayersDrafter
from paradraft.models.loading import locate
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, gathered
from paradraft.ragged import upload
from paradraft.tree import ABSENT, MOST_CANDIDATES

EXPANDED = 10
"""Nodes that are expanded at each depth, and tokens that are thought of after each, as in EAGLE-2's code."""


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

    branching = "tree"

    def __init__(self, target: CausalLM, head: Head, runtime: Runtime) -> None:
        width = target.model.config.hidden_size
        self._join = target.linear(head.tensor("fc.weight", width, 2 * width), head.tensor("fc.bias", width))
        super().__init__(DraftLayers(target, head, runtime, joined=self._joined))

    def _joined(self, embeddings: Tensor, states: Tensor) -> Tensor:
        return self._join(torch.cat([embeddings.to(states.dtype), states], dim=-1))

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads what is not read, then drafts token by token.

        The side branches of a tree of fixed paths hold the next best tokens after the best ones.
        """
        if self._tree is None or self._tree.budget is None or max(lengths) == 0:
            return self.one_by_one(lengths)
        return self._grown(lengths, self._tree.budget)

    def _grown(self, lengths: Sequence[int], budget: int) -> Draft:
        layers, target, k = self.layers, self.layers.target, max(lengths)
        number, widest = min(budget, EXPANDED, MOST_CANDIDATES), min(budget, EXPANDED, max(layers.lm.width // k, 1))
        states_BWD = layers.read(lengths)
        B = len(states_BWD)
        is_wanted_B1 = upload(lengths, target.device)[:, None] > 0
        nothing_B0 = is_wanted_B1.long()[:, :0]
        first = self._sampler.likeliest_after(target.head(states_BWD), 0, number)
        tokens_BN, values_BN = first.tokens.flatten(1), first.log_probs.flatten(1)
        parents_BN = torch.full_like(tokens_BN, ABSENT)
        level, after_BN = 0, torch.zeros_like(tokens_BN)  # which expanded node of the depth before each node follows
        paths_BWD, before_BX = nothing_B0[:, None], nothing_B0
        vectors_BXD = states_BWD[:, :0]
        for depth in range(1, k):
            values_BW, chosen_BW = values_BN[:, level:].topk(min(widest, values_BN.shape[1] - level), dim=1)
            chosen_BW, W = chosen_BW + level, chosen_BW.shape[1]
            new_BW, slot_BW = tokens_BN.gather(1, chosen_BW), after_BN.gather(1, chosen_BW)
            vectors_BWD = layers.joined(target.embed(new_BW), gathered(states_BWD, slot_BW))
            paths_BWD = torch.cat([gathered(paths_BWD, slot_BW), new_BW[:, :, None]], dim=2)
            last = before_BX.shape[1] - states_BWD.shape[1]  # where the expanded nodes of the depth before begin
            before_BX = torch.cat([before_BX, slot_BW + last if depth > 1 else torch.full_like(slot_BW, -1)], dim=1)
            vectors_BXD = torch.cat([vectors_BXD, vectors_BWD], dim=1)
            present_BX = torch.where(is_wanted_B1, 0, ABSENT).expand(B, before_BX.shape[1])
            states_BWD = layers.look(present_BX, before_BX, vectors_BXD)[:, -W:]
            found = self._sampler.likeliest_after(target.head(states_BWD), depth, number, paths_BWD)
            level, C = tokens_BN.shape[1], found.tokens.shape[2]
            tokens_BN = torch.cat([tokens_BN, found.tokens.flatten(1)], dim=1)
            values_BN = torch.cat([values_BN, (values_BW[:, :, None] + found.log_probs).flatten(1)], dim=1)
            parents_BN = torch.cat([parents_BN, chosen_BW.repeat_interleave(C, dim=1)], dim=1)
            after_BN = torch.arange(W, device=target.device).repeat_interleave(C).expand(B, -1)
            after_BN = torch.nn.functional.pad(after_BN, (level, 0))
        return likeliest_nodes(tokens_BN.masked_fill(~is_wanted_B1, ABSENT), parents_BN, values_BN, budget)


def likeliest_nodes(tokens_BN: Tensor, parents_BN: Tensor, values_BN: Tensor, budget: int) -> Draft:
    """The draft of the `budget` likeliest of some nodes.

    Args:
        tokens_BN: of the nodes.
        parents_BN: of each node an earlier one, or -1.
        values_BN: the logarithm of the estimated probability of the path to each; none is above its parent's, so a
            node's parents are among the likeliest too. -inf for nodes that are none.

    >>> tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 1]])
    >>> draft = likeliest_nodes(tokens, parents, torch.tensor([[-0.1, -2.0, -0.3, -2.5]]), 3)
    >>> draft.tokens.tolist(), draft.parents.tolist()
    ([[5, 6, 7]], [[-1, -1, 0]])
    """
    best_BN = values_BN.sort(dim=1, descending=True, stable=True).indices[:, :budget].sort(dim=1).values
    place_BN = torch.full_like(tokens_BN, ABSENT)
    place_BN = place_BN.scatter(1, best_BN, torch.arange(best_BN.shape[1], device=best_BN.device).expand_as(best_BN))
    kept_BN = parents_BN.gather(1, best_BN)
    parents = torch.where(kept_BN == ABSENT, ABSENT, place_BN.gather(1, kept_BN.clamp(min=0)))
    is_none_BN = values_BN.gather(1, best_BN) == -torch.inf
    return Draft(tokens=tokens_BN.gather(1, best_BN).masked_fill(is_none_BN, ABSENT), parents=parents)


def build(config: Config, target: Target, runtime: Runtime) -> EagleDrafter:
    """Loads the layer.

    Raises:
        ValueError: there is none, or it was trained for another target.
    """
    head = read_head(locate(config.draft, "eagle"), "eagle", target.lm.model.config)
    return EagleDrafter(target.lm, head, runtime)

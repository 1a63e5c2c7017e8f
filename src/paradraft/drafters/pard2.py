"""PARD-2: PARD whose inputs also have the target's states (An et al. 2026).

The input of a token x_t is e(x_t) + s W [h_1; …; h_n], with the states of n target layers at the token before it, from
which the target predicted x_t; 0 for the first token of a text. Masks have the states of the last committed token. With
W = 0 it is PARD.

Shape letters: B rows of a batch, M committed tokens, K drafted tokens, D width of the draft model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paradraft.core import Committed, Draft
from paradraft.drafters.parts.draft_loading import load_parallel_lm
from paradraft.drafters.parts.model_drafter import Config, ModelDrafter
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenCorrection, PreviousTokenHead, load_head
from paradraft.drafters.parts.pending_states import PendingVectors
from paradraft.formats.pard2 import StateProjection, read_projection
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target, gathered
from paradraft.sources.loading import locate
from paradraft.traits import Serving, Traits


def target_layer(index: int, layers: int) -> int:
    """Converts an index into `hidden_states` of `transformers` to a hidden layer, numbered as in `Forward`.

    Args:
        layers: number of the target's layers.

    Raises:
        ValueError: the target has fewer layers.

    >>> [target_layer(index, 24) for index in (-1, -8, 24, 0, 3)]
    [-1, 17, -1, 0, 3]
    """
    place = index if index >= 0 else layers + 1 + index
    if not 0 <= place <= layers:
        raise ValueError(
            f"the draft reads the target's hidden states {index}, and this target has only {layers} layers"
        )
    return FINAL_NORM if place == layers else place


class Pard2Drafter(ModelDrafter):
    """One pass of a causal LM over tokens and masks with the target's states.

    Args:
        masks: its mask tokens, one for each position of the draft after the first; the last for all later ones.
        states: the projection of the target's states.
        layers: number of the target's layers.
        previous: corrects the logits by the tokens drafted before, if the model has such a head.
    """

    traits = Traits(label="PARD-2", words="a parallel drafter on the target's states", branching="tree")
    serving = Serving(
        refusal="vLLM does not give a draft model the target's states: serve the same folder as PARD, without them"
    )

    def __init__(
        self,
        lm: CausalLM,
        masks: range,
        states: StateProjection,
        *,
        layers: int,
        previous: PreviousTokenHead | None = None,
    ) -> None:
        self.hidden_layers = tuple(target_layer(index, layers) for index in states.layers)
        bias = None if states.bias is None else states.scale * states.bias
        self._project = lm.linear(states.scale * states.weight, bias)
        width = lm.model.config.hidden_size
        self._pending = PendingVectors(lm, embed=lm.embed, states_of=self._projected, width=width, joined=torch.add)
        super().__init__(lm, self._pending)
        self.models = (lm,)
        self.reserved_tokens = tuple(masks)
        self._masks_MD = lm.embed(torch.tensor(list(masks), device=lm.device))
        self._path_head = None if previous is None else PreviousTokenCorrection(lm, previous)
        self._layers = () if previous is None else (FINAL_NORM,)  # the states that it corrects

    def _projected(self, new: Committed) -> Tensor:
        """`[B, M, D]` addends of the embeddings of committed tokens."""
        states = [new.hidden[layer].to(self.lm.device) for layer in self.hidden_layers]
        return self._project(torch.cat(states, dim=-1))

    def _masks(self, states_B1D: Tensor, k: int) -> tuple[Tensor, Tensor]:
        which = torch.arange(k - 1, device=self.lm.device).clamp(max=len(self._masks_MD) - 1)
        shape = len(states_B1D), k - 1, -1
        return self._masks_MD[which].expand(*shape), states_B1D.expand(*shape)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Reads the pending tokens and K - 1 masks with their states, and draws all K tokens."""
        if max(lengths) == 0:
            return Draft.empty(len(lengths), self.lm.device)
        out, places_BK = self._pending.read(lengths, self._masks, self._layers)
        states_BKD = gathered(out.hidden[FINAL_NORM], places_BK) if self._path_head else None
        return draft_of_pass(self._sampler, self._tree, out.logits, self._path_head, states_BKD)


def build(config: Config, target: Target, runtime: Runtime) -> Pard2Drafter:
    """Loads the PARD model and its projection.

    Raises:
        ValueError: as of PARD; or it reads no states, or those of another target.
    """
    lm, masks = load_parallel_lm(locate(config.draft, "pard2"), target, runtime)
    of_target = target.lm.model.config
    return Pard2Drafter(
        lm,
        masks,
        read_projection(lm.model.config, width=of_target.hidden_size),
        layers=of_target.num_hidden_layers,
        previous=load_head(lm.model.config),
    )

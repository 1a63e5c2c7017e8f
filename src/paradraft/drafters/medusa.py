"""Medusa: heads on the target's last hidden state draft the next K tokens independently (Cai et al. 2024, 2.1).

Head i of K is residual blocks and an output head: logits = W (h + SiLU(A_i h + b_i)). It reads the state h from which
the last committed token was predicted, and predicts the i-th token after that one. W is the target's output head, or a
separate one per head, as published.

Shape letters: B rows of a batch, K heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from paradraft.core import Draft
from paradraft.drafters.parts.draft_head import draft_head, drafted_ids
from paradraft.drafters.parts.last_states import LastStates
from paradraft.drafters.parts.model_drafter import Config, ModelDrafter
from paradraft.drafters.parts.one_pass import draft_of_pass
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sources.loading import locate
from paradraft.traits import Serving, Traits


class MedusaDrafter(ModelDrafter):
    """K heads on the state after the target's final norm."""

    traits = Traits(branching="tree")
    serving = Serving(vllm="medusa", as_exported=True, one_k=True, passes=", each by a head of its own.")
    hidden_layers = (FINAL_NORM,)

    def __init__(self, lm: CausalLM, head: Head) -> None:
        self._last = LastStates(lm)
        super().__init__(lm, self._last)
        self.max_k = head.setting("num_heads", int)
        blocks = range(self.max_k)
        width = lm.model.config.hidden_size
        names = [
            [f"blocks.{n}.layers.{layer}" for n in blocks] for layer in range(head.setting("num_hidden_layers", int))
        ]
        self._blocks = [
            [
                lm.linear(head.tensor(f"{name}.weight", width, width), head.tensor(f"{name}.bias", width))
                for name in layer
            ]
            for layer in names
        ]
        self._head = draft_head(lm, head)
        self._heads: list[Callable[[Tensor], Tensor]] | None = None
        if not head.setting("original_lm_head", bool):
            _, rows, self._ids = drafted_ids(lm, head)
            self._heads = [lm.linear(head.tensor(f"lm_heads.{index}.weight", rows, width)) for index in blocks]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Drafts with the first `max(lengths)` heads."""
        if (k := max(lengths)) == 0:
            return Draft.empty(len(lengths), self.lm.device)
        return draft_of_pass(self._sampler, self._tree, self._logits(k))

    def _logits(self, k: int) -> Tensor:
        """`[B, K, V]` of the first `k` heads."""
        states_BKD = self._last.states_BD[:, None].expand(-1, k, -1)
        for layer in self._blocks:
            moved = [block(states_BKD[:, index]) for index, block in enumerate(layer[:k])]
            states_BKD = states_BKD + silu(torch.stack(moved, dim=1))
        if self._heads is None:
            return self._head(states_BKD)
        each = [head(states_BKD[:, index]) for index, head in enumerate(self._heads[:k])]
        return self._ids.logits(torch.stack(each, dim=1))


def build(config: Config, target: Target, runtime: Runtime) -> MedusaDrafter:
    """Loads the heads."""
    head = read_head(locate(config.draft, "medusa"), "medusa", target.lm.model.config)
    return MedusaDrafter(target.lm, head)

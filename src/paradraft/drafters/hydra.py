"""Hydra: Medusa heads that also read the tokens drafted before their own (Ankner et al. 2024, section 3).

Head i reads the state h from which the last committed token was predicted, the embedding of that token, and those of
the i - 1 tokens drafted after it: logits = W (h + SiLU(A_i [h; e_0; ...; e_{i-1}] + b_i)). W is the target's own head.

Shape letters: B rows of a batch, K heads, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from paradraft.core import Draft
from paradraft.drafters.parts.draft_head import draft_head
from paradraft.drafters.parts.last_states import LastStates
from paradraft.drafters.parts.model_drafter import Config, ModelDrafter
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.forward.cpu.tree import grow
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling.candidates import Candidates, assemble, candidates_needed, joined
from paradraft.sources.loading import locate
from paradraft.traits import INSTEAD, Serving, Traits


class HydraDrafter(ModelDrafter):
    """K heads, evaluated in sequence."""

    traits = Traits(branching="spine")
    serving = Serving(
        refusal="vLLM's Medusa heads read the target's state alone, and Hydra's also the tokens before their own: "
        f"{INSTEAD}"
    )
    hidden_layers = (FINAL_NORM,)

    def __init__(self, lm: CausalLM, head: Head) -> None:
        self._last = LastStates(lm)
        super().__init__(lm, self._last)
        self.max_k = head.setting("num_heads", int)
        self._scale = head.setting("embedding_scale", float)
        self._head = draft_head(lm, head)
        width = lm.model.config.hidden_size
        self._blocks = [
            lm.linear(
                head.tensor(f"blocks.{index}.weight", width, (index + 2) * width),
                head.tensor(f"blocks.{index}.bias", width),
            )
            for index in range(self.max_k)
        ]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Drafts token by token; a tree's side branches are the next best tokens."""
        if (k := max(lengths)) == 0:
            return Draft.empty(len(lengths), self.lm.device)
        best_BK = torch.empty(len(lengths), 0, dtype=torch.long, device=self.lm.device)
        read_BX = torch.cat([self._last.states_BD, self._embedded(self._last.tokens_B)], dim=1)
        count = candidates_needed(self._tree)
        candidates: list[Candidates] = []
        for depth, block in enumerate(self._blocks[:k]):
            if candidates:
                read_BX = torch.cat([read_BX, self._embedded(best_BK[:, -1])], dim=1)
            logits_B1V = self._head((self._last.states_BD + silu(block(read_BX)))[:, None])
            candidates.append(self._sampler.candidates(logits_B1V, depth, count, best_BK))
            best_BK = torch.cat([best_BK, candidates[-1].tokens[:, :, 0]], dim=1)
        return assemble(joined(candidates), self._tree, aside=0.0, faster=grow)

    def _embedded(self, tokens_B: Tensor) -> Tensor:
        return self._scale * self.lm.embed(tokens_B).to(self._last.states_BD.dtype)


def build(config: Config, target: Target, runtime: Runtime) -> HydraDrafter:
    """Loads the heads."""
    head = read_head(locate(config.draft, "hydra"), "hydra", target.lm.model.config)
    return HydraDrafter(target.lm, head)

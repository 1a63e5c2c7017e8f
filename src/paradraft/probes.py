"""Prompt tokens (PPD), which the target reads in the pass of a draft.

Shape letters: B rows of a batch, P prompt tokens, Q of them after one node, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradraft.tree import ABSENT


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Prompt tokens (PPD), which the target reads in the pass of a draft and which never become text.

    They form chains, each after a node of the draft. The target's states of a chain predict the tokens after that node.

    Args:
        nodes: `[B, P]` the node that the chain of each prompt token follows; -1 is the last committed token.
        before: `[B, P]` the index of the previous prompt token of the chain, always smaller; -1 for the first.
        tokens: `[B, P]` ids from `CausalLM.add_embeddings`; `ABSENT` where a row has fewer.
        states: `[B, P, D]` the target's hidden states after the final norm; None before the pass.
    """

    nodes: Tensor
    before: Tensor
    tokens: Tensor
    states: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.nodes.ndim == 2 and self.nodes.shape == self.before.shape == self.tokens.shape
        assert self.states is None or self.states.shape[:2] == self.nodes.shape

    def without(self, is_gone_BP: Tensor) -> Probes:
        """Removes prompt tokens `[B, P]`; all that follow a removed one in its chain must be removed too."""
        nodes, before, tokens = (
            each.masked_fill(is_gone_BP, ABSENT) for each in (self.nodes, self.before, self.tokens)
        )
        return Probes(nodes=nodes, before=before, tokens=tokens, states=self.states)

    def after(self, last_B: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `[B, Q]` and states `[B, Q, D]` of the prompt tokens after one node of each row, in order, padded with
        `ABSENT`. Only after the pass.

        >>> import torch
        >>> probes = Probes(
        ...     nodes=torch.tensor([[-1, 4, 4]]), before=torch.tensor([[-1, -1, 1]]),
        ...     tokens=torch.tensor([[90, 90, 91]]), states=torch.tensor([[[0.5], [0.6], [0.7]]]),
        ... )
        >>> [part.flatten().tolist() for part in probes.after(torch.tensor([4]))]
        [[90, 91], [0.6000000238418579, 0.699999988079071]]
        """
        assert self.states is not None
        is_other_BP = (self.nodes != last_B[:, None]) | (self.tokens == ABSENT)
        most = int((~is_other_BP).sum(1).max())
        order_BQ = is_other_BP.long().argsort(dim=1, stable=True)[:, :most]
        tokens_BQ = self.tokens.gather(1, order_BQ).masked_fill(is_other_BP.gather(1, order_BQ), ABSENT)
        return tokens_BQ, self.states.gather(1, order_BQ[:, :, None].expand(-1, -1, self.states.shape[2]))

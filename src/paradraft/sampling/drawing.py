"""Draws from given distributions by inverse transform: one uniform number for each token.

Where target and drafter must draw alike, they add the same noise to their logits instead (`distribution.py`).

Shape letters: B rows of a batch, R positions, C tokens drawn at a position, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import INVALID


def token_at(weights_BRV: Tensor, shares_BR: Tensor) -> Tensor:
    """The tokens `[B, R]` at which the sums of weights pass these shares, in (0, 1), of the totals: draws in proportion
    to the weights, in float64, where shares are uniform. `INVALID` where a total is 0 or NaN.

    >>> token_at(torch.tensor([[[0.0, 1.0, 0.0, 3.0]] * 3]).double(), torch.tensor([[0.01, 0.24, 0.26]])).tolist()
    [[1, 1, 3]]
    """
    sums_BRV = weights_BRV.cumsum(-1)
    total_BR1 = sums_BRV[..., -1:]
    # However a product is rounded, it stays below the total, so that the token at it has a weight.
    reached_BR1 = torch.minimum(shares_BR[..., None] * total_BR1, total_BR1.nextafter(torch.zeros_like(total_BR1)))
    token_BR1 = torch.searchsorted(sums_BRV, reached_BR1, right=True)
    return token_BR1.masked_fill(~(total_BR1 > 0), INVALID)[..., 0]


def without_replacement(q_BRV: Tensor, shares_BRC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draws C different tokens at each position, one after the other.

    Returns:
        The tokens `[B, R, C]`; the logarithms of their probabilities in q, -inf where no token is left and NaN where q
        is; and the distributions `[B, R, C, V]` that each was drawn from, without the tokens before it.
    """
    left_BRV, tokens, log_probs, probs = q_BRV, [], [], []
    for rank in range(shares_BRC.shape[-1]):
        total_BR1 = left_BRV.sum(-1, keepdim=True)
        probs.append(left_BRV / total_BR1.clamp(min=1e-300) if rank else q_BRV)
        tokens.append(token_at(left_BRV, shares_BRC[..., rank]))
        index_BR1 = tokens[-1][..., None].clamp(min=0)
        log_probs.append(torch.where(total_BR1 == 0, -torch.inf, q_BRV.gather(-1, index_BR1).log())[..., 0])
        if rank + 1 < shares_BRC.shape[-1]:
            left_BRV = left_BRV.scatter(-1, index_BR1, 0.0)
    return torch.stack(tokens, -1), torch.stack(log_probs, -1), torch.stack(probs, 2)

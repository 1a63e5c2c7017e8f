"""Tokens drawn in the plainest way, to compare with."""

from __future__ import annotations

from torch import Tensor

from paradraft.sampling.distribution import best_token, filtered_logits
from paradraft.sampling.noise import gumbel_noise
from paradraft.sampling_params import Sampling


def draw(logits_BNV: Tensor, positions_BN: Tensor, sampling: Sampling) -> Tensor:
    """The token `[B, N]` of each absolute position: argmax of the logits plus that position's noise."""
    if sampling.is_greedy:
        return best_token(logits_BNV)
    noise = gumbel_noise(sampling.seed, positions_BN, logits_BNV.shape[-1])
    return best_token(filtered_logits(logits_BNV, sampling) + noise)

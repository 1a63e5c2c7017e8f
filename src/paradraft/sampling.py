"""From logits to tokens: one rule for target and draft alike.

Every position of a request has its own random numbers, a function of (seed, position, token id)
alone. A token is drawn as argmax(log p + Gumbel noise), which has exactly the distribution p
(Gumbel 1954; Maddison, Tarlow & Minka 2014, "A* sampling"). Because the noise belongs to the
position and not to the step, decoding in any number of passes gives the same text.

Shape letters: B rows of a batch, N positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paradraft.core import Sampling

# SplitMix64 (Steele, Lea & Flood 2014): stream increment and the two multipliers of its finalizer,
# written as signed 64-bit numbers because torch has no unsigned arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def filtered_logits(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """Logits after temperature, top-k and top-p, at least in float32; what is cut is -inf.

    The order and the treatment of ties follow `transformers`: temperature, top-k (ties with the
    k-th stay), top-p (the token that crosses p stays).

    Args:
        logits_BNV: `[B, N, V]` raw logits of any float type.
        sampling: temperature above 0.
    """
    logits = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    return logits


def probabilities(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution `[B, N, V]` that tokens are drawn from; one-hot when greedy."""
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(logits_BNV.argmax(-1), logits_BNV.shape[-1]).to(torch.float32)
    return filtered_logits(logits_BNV, sampling).softmax(-1)


def draw(logits_BNV: Tensor, positions_BN: Tensor, sampling: Sampling) -> Tensor:
    """The token `[B, N]` of each position: argmax of the logits plus that position's noise.

    Args:
        logits_BNV: `[B, N, V]` raw logits.
        positions_BN: `[B, N]` absolute position of the token to be drawn, the prompt's first is 0.
        sampling: how to choose.

    >>> logits = torch.tensor([[[0.0, 2.0, 1.0]]])
    >>> draw(logits, torch.tensor([[4]]), Sampling()).tolist()
    [[1]]
    """
    if sampling.is_greedy:
        return logits_BNV.argmax(-1)
    noise = gumbel_noise(sampling.seed, positions_BN, logits_BNV.shape[-1])
    return (filtered_logits(logits_BNV, sampling) + noise).argmax(-1)


def gumbel_noise(seed: int, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[B, N, V]` in float64, a pure function of (seed, position, token id).

    The same on every device and in every batch: token v of a position takes the v-th number of
    a SplitMix64 stream whose start is hashed from seed and position.
    """
    start = _mix(_mix(torch.full_like(positions_BN, seed) + _GOLDEN) + (positions_BN + 1) * _GOLDEN)
    index = torch.arange(1, vocab_size + 1, device=positions_BN.device) * _GOLDEN
    bits = _mix(start[..., None] + index)
    # 52 bits and not 53: the half must fit too, or the largest number would round to 1 and its noise be infinite.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _mix(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64 words; overflow wraps around."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

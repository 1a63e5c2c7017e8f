"""From logits to tokens: one rule for target and draft alike.

Every position of a request has its own random numbers, a function of (seed, position, token id)
alone. A token is drawn as argmax(log p + Gumbel noise), which has exactly the distribution p
(Gumbel 1954; Maddison, Tarlow & Minka 2014, "A* sampling"). Because the noise belongs to the
position and not to the step, decoding in any number of passes gives the same text.

These are the pure functions; `sampler.py` applies them to the rows of a batch.

Shape letters: B rows of a batch, N positions, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paradraft.core import ABSENT, Sampling

# SplitMix64 (Steele, Lea & Flood 2014): stream increment and the two multipliers of its finalizer,
# written as signed 64-bit numbers because torch has no unsigned arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
LIKELIEST = 1024
"""How many tokens of a position are sorted for top-p, where they reach p."""


def penalized_logits(logits_BNV: Tensor, sampling: Sampling, texts_BNT: Tensor, prompt_lengths_B: Tensor) -> Tensor:
    """Logits after bias, penalties and processors, at least in float32.

    The repetition penalty counts prompt and answer, as in `transformers`; presence and frequency
    penalties count the answer, as in the OpenAI interface.

    Args:
        logits_BNV: `[B, N, V]` raw logits of any float type.
        sampling: what to apply.
        texts_BNT: `[B, N, T]` for each position the tokens before it, prompt first; `ABSENT` may
            stand anywhere. Not looked at unless `sampling.reads_text`.
        prompt_lengths_B: `[B]` how many of them are the prompt.
    """
    logits = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
    B, N, V = logits.shape
    if sampling.biases:
        tokens, biases = zip(*sampling.biases, strict=True)
        logits = logits.clone()
        logits[..., list(tokens)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if sampling.repetition_penalty != 1.0:
        seen = _counts(texts_BNT, V) > 0
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.presence_penalty or sampling.frequency_penalty:
        place_BNT = (texts_BNT != ABSENT).cumsum(2)
        counts = _counts(texts_BNT.masked_fill(place_BNT <= prompt_lengths_B[:, None, None], ABSENT), V)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.processors:
        logits = logits.clone()
        texts = [[token for token in text if token != ABSENT] for text in texts_BNT.flatten(0, 1).tolist()]
        flat_MV = logits.view(B * N, V)
        # Texts of one length are given together, as rows of one batch.
        for length in {len(text) for text in texts}:
            rows = [row for row, text in enumerate(texts) if len(text) == length]
            scores = flat_MV[rows]
            ids = torch.tensor([texts[row] for row in rows], device=logits.device)
            for processor in sampling.processors:
                scores = processor(ids, scores)
            flat_MV[rows] = scores.to(flat_MV.dtype)
    return logits


def _counts(texts_BNT: Tensor, vocab_size: int) -> Tensor:
    """`[B, N, V]` how often each token occurs in each text."""
    B, N, _ = texts_BNT.shape
    places = torch.where(texts_BNT < vocab_size, texts_BNT, ABSENT) % (vocab_size + 1)  # ABSENT counts behind the end
    ones = torch.ones_like(places)
    return torch.zeros(B, N, vocab_size + 1, dtype=torch.long, device=places.device).scatter_add(2, places, ones)[
        ..., :-1
    ]


def filtered_logits(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """Logits after temperature, top-k, top-p and min-p, at least in float32; what is cut is -inf.

    The order and the treatment of ties follow `transformers`: temperature, top-k (ties with the
    k-th stay), top-p (the token that crosses p stays), min-p.

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
        logits = logits.masked_fill(_outside_nucleus(logits, sampling.top_p), -torch.inf)
    if sampling.min_p > 0.0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return logits


def _outside_nucleus(logits_BNV: Tensor, p: float) -> Tensor:
    """Which tokens `[B, N, V]` are not among the fewest likeliest that together reach p; of equal ones the first are.

    Only the `LIKELIEST` tokens of a position are sorted, and all where those do not reach p: sorting nine positions of
    a vocabulary of 152,000 takes a CPU 160 ms, this 15.
    """
    rows_MV = logits_BNV.flatten(0, -2)
    total_M1 = rows_MV.logsumexp(-1, keepdim=True)

    def nucleus(ordered: Tensor, total_M1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = (ordered - total_M1).exp()
        reached = probs.cumsum(-1)
        size_M1 = (reached - probs < p).sum(-1, keepdim=True)
        return size_M1, ordered.gather(-1, size_M1 - 1), reached[:, -1] < p

    size_M1, least_M1, is_wider_M = nucleus(rows_MV.topk(min(LIKELIEST, rows_MV.shape[-1])).values, total_M1)
    if len(wider := is_wider_M.nonzero()[:, 0]):
        ordered = rows_MV[wider].sort(dim=-1, descending=True).values
        size_M1[wider], least_M1[wider], _ = nucleus(ordered, total_M1[wider])
    outside_MV = rows_MV < least_M1
    if bool(((~outside_MV).sum(-1, keepdim=True) > size_M1).any()):  # several are as likely as the last one
        room_M1 = size_M1 - (rows_MV > least_M1).sum(-1, keepdim=True)
        is_last_MV = rows_MV == least_M1
        outside_MV |= is_last_MV & (is_last_MV.cumsum(-1) > room_M1)
    return outside_MV.view(logits_BNV.shape)


def probabilities(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution `[B, N, V]` that tokens are drawn from, in float64; one-hot when greedy."""
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(logits_BNV.argmax(-1), logits_BNV.shape[-1]).double()
    return filtered_logits(logits_BNV, sampling).double().softmax(-1)


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


def gumbel_noise(seed: int | Tensor, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise `[B, N, V]` in float64, a pure function of (seed, position, token id).

    Args:
        seed: one for all rows, or `[B]` of int64.
        positions_BN: `[B, N]`.
        vocab_size: V.
    """
    return -(-_uniform(seed, positions_BN, vocab_size).log()).log()


def uniform_numbers(seed: int | Tensor, positions_BN: Tensor) -> Tensor:
    """Numbers `[B, N]` in float64, uniform between 0 and 1, a pure function of (seed, position)."""
    return _uniform(seed, positions_BN, 1)[..., 0]


def seed_of(seed: int | Tensor, purpose: int) -> Tensor:
    """Another seed, for random numbers that must have nothing to do with those of `seed`.

    Args:
        seed: one, or `[B]` of int64.
        purpose: a number above 0; each gives another seed.
    """
    return _mix(torch.as_tensor(seed) ^ _mix(torch.as_tensor(purpose) * _GOLDEN))


def _uniform(seed: int | Tensor, positions_BN: Tensor, count: int) -> Tensor:
    """`[B, N, count]`, the same on every device and in every batch: number v of a position is the v-th of
    a SplitMix64 stream whose start is hashed from seed and position."""
    seeds = torch.as_tensor(seed, device=positions_BN.device)
    seeds = seeds[:, None] if seeds.ndim else seeds
    start = _mix(_mix(seeds + _GOLDEN) + (positions_BN + 1) * _GOLDEN)
    index = torch.arange(1, count + 1, device=positions_BN.device) * _GOLDEN
    bits = _mix(start[..., None] + index)
    # 52 bits and not 53: the half must fit too, or the largest number would round to 1 and its noise be infinite.
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64 on int64 words; overflow wraps around."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

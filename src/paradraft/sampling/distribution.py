"""Sampling from logits: one rule for target and drafter.

Every position of a request has its own random numbers (`noise.py`). A token is drawn as argmax(log p + Gumbel noise),
which has exactly the distribution p (Gumbel 1954; Maddison, Tarlow & Minka 2014, "A* sampling"). Because the noise
depends on the position and not on the step, decoding in any number of passes gives the same text.

These are the pure functions; `sampler.py` applies them to the rows of a batch.

Shape letters: B rows of a batch, N positions, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paradraft.core import INVALID
from paradraft.errors import one_line
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT

LIKELIEST = (256, 4096)
"""Numbers of tokens of a position that are sorted for top-p, if their probability reaches p; else all are."""


def penalized_logits(
    logits_BNV: Tensor,
    sampling: Sampling,
    texts_BNT: Tensor,
    prompt_lengths_B: Tensor,
    *,
    eos_ids: frozenset[int] = frozenset(),
    limits_B: Tensor | None = None,
) -> Tensor:
    """Logits after bias, penalties and processors, at least in float32.

    The repetition penalty counts prompt and answer, as in `transformers`; presence and frequency penalties count the
    answer, as in the OpenAI interface.

    Args:
        texts_BNT: the tokens before each position, prompt first; `ABSENT` may be anywhere. Ignored unless
            `sampling.reads_text`.
        prompt_lengths_B: number of prompt tokens.
        eos_ids: tokens that end an answer. Processors are not called for texts with tokens after one, or with an
            `INVALID` token: decoding never gets there, so these logits are not used, and a processor need not handle
            such texts.
        limits_B: most tokens of an answer, after which processors are not called either; None for no limit.

    Raises:
        ValueError: a processor returned something else than logits of the same shape.
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
        ordinal_BNT = (texts_BNT != ABSENT).cumsum(2)
        counts = _counts(texts_BNT.masked_fill(ordinal_BNT <= prompt_lengths_B[:, None, None], ABSENT), V)
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.processors:
        logits = logits.clone()
        texts = [[token for token in text if token != ABSENT] for text in texts_BNT.flatten(0, 1).tolist()]
        answers = [text[length:] for text, length in zip(texts, _per_text(prompt_lengths_B, N), strict=True)]
        limits = [math.inf] * len(texts) if limits_B is None else _per_text(limits_B, N)
        ends = eos_ids | {INVALID}
        is_over = [len(new) >= limit or not ends.isdisjoint(new) for new, limit in zip(answers, limits, strict=True)]
        flat_MV = logits.view(B * N, V)
        # Texts of equal length are processed together, as rows of one batch.
        for length in {len(text) for text, over in zip(texts, is_over, strict=True) if not over}:
            rows = [row for row, text in enumerate(texts) if len(text) == length and not is_over[row]]
            scores = flat_MV[rows]
            ids = torch.tensor([texts[row] for row in rows], device=logits.device)
            for processor in sampling.processors:
                scores = _same_shape(processor(ids, scores), scores)
            flat_MV[rows] = scores.to(flat_MV.dtype)
    return logits


def _same_shape(returned: object, logits_MV: Tensor) -> Tensor:
    """Checks a processor's output: another shape could broadcast into rows of other texts, which depend on the pass."""
    shape = tuple(logits_MV.shape)
    if not isinstance(returned, Tensor):
        raise ValueError(f"a processor returned {one_line(returned)}: return logits of all texts, of the shape {shape}")
    if returned.shape != shape:
        raise ValueError(
            f"a processor returned logits of the shape {tuple(returned.shape)}: return those of all texts, {shape}"
        )
    return returned


def _per_text(values_B: Tensor, N: int) -> list[int]:
    return [value for value in values_B.tolist() for _ in range(N)]


def _counts(texts_BNT: Tensor, vocab_size: int) -> Tensor:
    """`[B, N, V]` number of occurrences of each token in each text."""
    B, N, _ = texts_BNT.shape
    ids = texts_BNT.where(texts_BNT >= 0, vocab_size).clamp(max=vocab_size)  # padding is counted at index V
    ones = torch.ones_like(ids)
    return torch.zeros(B, N, vocab_size + 1, dtype=torch.long, device=ids.device).scatter_add(2, ids, ones)[..., :-1]


def largest_probabilities(logits_BNV: Tensor, temperatures_B: Tensor) -> Tensor:
    """`[B, N]` the largest probability at each position, in float64; filters do not count."""
    scores = logits_BNV / temperatures_B[:, None, None]
    return scores.amax(-1).sub(scores.logsumexp(-1)).exp().double()


def filtered_logits(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """Logits after temperature (above 0), top-k, top-p and min-p, at least in float32; removed tokens are -inf.

    The order and the treatment of ties follow `transformers`: temperature, top-k (ties with the k-th stay), top-p (the
    token that crosses p stays), min-p. All NaN at a position whose largest logit is not a finite number.
    """
    logits = logits_BNV if logits_BNV.dtype == torch.float64 else logits_BNV.float()
    is_valid_BN1 = logits.amax(-1, keepdim=True).isfinite()
    if not bool(is_valid_BN1.all()):
        valid = filtered_logits(logits.where(is_valid_BN1, 0.0), sampling)
        return valid.where(is_valid_BN1, torch.nan)
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
    """Mask `[B, N, V]` of the tokens outside the nucleus, the fewest likeliest that reach p; ties in order of id.

    Only the likeliest tokens of a position are sorted where these reach p: sorting nine positions of a vocabulary of
    152,000 takes a CPU 160 ms and more.
    """
    rows_MV = logits_BNV.flatten(0, -2)
    total_M1 = rows_MV.logsumexp(1, keepdim=True)
    size_M1, least_M1 = total_M1.new_zeros(total_M1.shape, dtype=torch.long), torch.empty_like(total_M1)
    left_m = torch.arange(len(rows_MV), device=rows_MV.device)
    for count in (*LIKELIEST, rows_MV.shape[1]):
        count = min(count, rows_MV.shape[1])
        ordered = (rows_MV if len(left_m) == len(rows_MV) else rows_MV[left_m]).topk(count).values
        probs = (ordered - total_M1[left_m]).exp()
        reached = probs.cumsum(1)
        size_m1 = (reached - probs < p).sum(1, keepdim=True).clamp(min=1)  # 0 by rounding, and for NaN
        size_M1[left_m], least_M1[left_m] = size_m1, ordered.gather(1, size_m1 - 1)
        left_m = left_m[reached[:, -1] < p]
        if not len(left_m) or count == rows_MV.shape[1]:
            break
    outside_MV = rows_MV < least_M1
    if bool((~outside_MV).sum() > size_M1.sum()):  # several are as likely as the last one
        room_M1 = size_M1 - (rows_MV > least_M1).sum(1, keepdim=True)
        is_last_MV = rows_MV == least_M1
        outside_MV |= is_last_MV & (is_last_MV.cumsum(1) > room_M1)
    return outside_MV.view(logits_BNV.shape)


def probabilities(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """The sampling distribution `[B, N, V]` in float64, one-hot when greedy; all NaN where the largest logit is not
    finite."""
    if sampling.is_greedy:
        best_BN = best_token(logits_BNV)
        one_hot = torch.nn.functional.one_hot(best_BN.clamp(min=0), logits_BNV.shape[-1]).double()
        return one_hot.masked_fill((best_BN == INVALID)[..., None], torch.nan)
    return filtered_logits(logits_BNV, sampling).double().softmax(-1)


def best_token(scores_BNV: Tensor) -> Tensor:
    """The token `[B, N]` with the largest score at each position, the first of equal ones.

    `INVALID` where the largest score is not a finite number; NaN counts as larger than all numbers. On CPUs this uses
    NumPy, because torch takes eight times as long for nine positions of 151,936 tokens.

    >>> best_token(torch.tensor([[[0.0, 2.0, 1.0], [0.0, 1.0, torch.nan], [-torch.inf] * 3]])).tolist()
    [[1, -2, -2]]
    """
    if scores_BNV.device.type == "cpu" and scores_BNV.dtype in (torch.float32, torch.float64):
        rows = scores_BNV.detach().numpy().reshape(-1, scores_BNV.shape[-1])
        best = [row.argmax() for row in rows]
        tokens = [token if math.isfinite(row[token]) else INVALID for token, row in zip(best, rows, strict=True)]
        return torch.tensor(tokens, dtype=torch.long).view(scores_BNV.shape[:-1])
    best_BN1 = scores_BNV.argmax(-1, keepdim=True)
    return best_BN1.where(scores_BNV.gather(-1, best_BN1).isfinite(), INVALID)[..., 0]

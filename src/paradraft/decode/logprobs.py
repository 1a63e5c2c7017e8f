"""Logprobs of the answer's tokens, from the target's logits before any sampling parameter changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """The logprob of a token of an answer, and the likeliest ids at its position with theirs, best first.

    Natural logarithms of probabilities over the ids that may be sampled.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits_MV: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprobs]:
    """Logprobs of M tokens, each with the `most` likeliest at its position.

    >>> logprobs = logprobs_of(torch.tensor([[0.0, 3.0, 1.0]]).softmax(1).log(), [2], 1)
    >>> [(each.token, round(each.logprob, 3), each.likeliest[0][0]) for each in logprobs]
    [(2, -2.17, 1)]
    """
    logits = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    log_p_MV = logits.log_softmax(-1)
    chosen = log_p_MV[torch.arange(len(tokens)), list(tokens)].tolist()
    best = log_p_MV.topk(min(most, log_p_MV.shape[1]))
    rows = zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token=token, logprob=logprob, likeliest=tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]

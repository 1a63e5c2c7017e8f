"""How likely the target finds the tokens of an answer: before any setting of a request changes its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """A token of an answer, and those that the target finds likeliest in its place.

    Probabilities are over the ids that may be sampled; their logarithms are natural ones.

    Args:
        token: its id.
        logprob: the logarithm of its probability.
        likeliest: ids and the logarithms of their probabilities, the likeliest first.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits_MV: Tensor, tokens: Sequence[int], most: int) -> list[TokenLogprobs]:
    """How likely some tokens are, each with the likeliest in its place.

    Args:
        logits_MV: `[M, V]` from which each is chosen.
        tokens: M ids.
        most: how many of the likeliest to tell.

    >>> found = logprobs_of(torch.tensor([[0.0, 3.0, 1.0]]).softmax(1).log(), [2], 1)
    >>> [(each.token, round(each.logprob, 3), each.likeliest[0][0]) for each in found]
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

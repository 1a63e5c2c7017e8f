"""Tests whether sampled tokens have the target's distribution, with an exact bound on false alarms.

For each token x, with its conditional probabilities p given all tokens before it, let u be drawn uniformly from the
interval of [0, 1] that belongs to x when the tokens are laid side by side, the likeliest first, each as wide as its p:
the randomized probability integral transform (PIT). If every token was drawn from its p, all u are independent and
uniform (Rosenblatt 1952, "Remarks on a multivariate transformation"; Brockwell 2007 for discrete ones), as long as no
two answers share their random numbers. Their empirical distribution then leaves a band of half-width e around the
diagonal with probability at most 2 exp(-2 n e²), for every n (Dvoretzky, Kiefer & Wolfowitz 1956; Massart 1990).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paradraft.core import Draft, Request, TargetOut, Verdict
from paradraft.parents import logit_rows
from paradraft.ragged import upload
from paradraft.sampling.sampler import Sampler
from paradraft.tree import ABSENT

FALSE_ALARM = 1e-6


@dataclass(frozen=True, kw_only=True)
class Uniformity:
    """Result of a test of uniformity.

    Args:
        distance: largest distance of their empirical distribution from the diagonal.
        limit: exceeded with probability at most `false_alarm` if the tokens have the distribution.
        impossible: tokens whose probability was 0; a single such token fails the test.
    """

    tokens: int
    distance: float
    limit: float
    false_alarm: float
    impossible: int

    @property
    def is_uniform(self) -> bool:
        """Whether the test was passed."""
        return self.distance <= self.limit and not self.impossible

    @property
    def in_words(self) -> str:
        """One clause with all figures."""
        words = (
            f"over {self.tokens} tokens the distance is {self.distance:.4f}, at most {self.limit:.4f} is allowed "
            f"(false alarms: {self.false_alarm:g})"
        )
        return words + (f", and {self.impossible} tokens are impossible" if self.impossible else "")


def uniformity(values: Tensor, most: int | None = None) -> Uniformity:
    """Tests PIT values `[n]`; those outside [0, 1] are of impossible tokens.

    The bound holds for an n that is fixed before. Where answers may end early, n depends on the tokens, so all possible
    values of n share the false alarms: the largest has half of them, the others have the rest.

    Args:
        most: largest n that was possible; None if n was fixed before.

    >>> uniformity((torch.arange(20_000) + 0.5) / 20_000).is_uniform
    True
    >>> uniformity(((torch.arange(20_000) + 0.5) / 20_000) ** 1.1).is_uniform
    False
    """
    possible = values[(values >= 0) & (values <= 1)].sort().values
    n = max(len(possible), 1)
    steps = torch.arange(len(possible) + 1, dtype=torch.float64, device=values.device) / n
    distance = torch.maximum(steps[1:] - possible, possible - steps[:-1]).max() if len(possible) else torch.tensor(1.0)
    share = 1.0 if most is None else 0.5 if len(values) >= most else 0.5 / most
    return Uniformity(
        tokens=len(possible),
        distance=float(distance),
        limit=math.sqrt(math.log(2 / (FALSE_ALARM * share)) / (2 * n)),
        false_alarm=FALSE_ALARM,
        impossible=len(values) - len(possible),
    )


@torch.no_grad()
def pit_of_answer(logits_NV: Tensor, request: Request, tokens: list[int], generator: torch.Generator) -> Tensor:
    """The PIT value u of each token of an answer, from logits `[N, V]` of the model's own pass; see `pit_values`."""
    device, N = logits_NV.device, len(tokens)
    answer = torch.tensor(tokens, device=device)
    before = torch.ones(N, N, dtype=torch.bool, device=device).tril(-1)
    p_NV = Sampler([request], device=device).probabilities(logits_NV[None], torch.where(before, answer, ABSENT)[None])[
        0
    ]
    return pit_values(p_NV, answer, generator)


def pit_values(p_NC: Tensor, columns_N: Tensor, generator: torch.Generator) -> Tensor:
    """The PIT value u of each token, `[N]` in float64; 2 where the token is impossible.

    Args:
        columns_N: `[N]`, the column of each token.
    """
    p_N1 = p_NC.gather(1, columns_N[:, None])
    likelier = p_NC.masked_fill(p_NC <= p_N1, 0.0).sum(1, keepdim=True)
    index = torch.arange(p_NC.shape[1], device=p_NC.device)
    tied = (p_NC.masked_fill((p_NC != p_N1) | (index >= columns_N[:, None]), 0.0)).sum(1, keepdim=True)
    chance = torch.rand(len(columns_N), 1, generator=generator, dtype=torch.float64)
    values = likelier + tied + chance.to(p_NC.device) * p_N1
    return values.masked_fill(p_N1 == 0, 2.0)[:, 0]


def accept_all(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Accepts the first path of every draft, without a look at the target: a wrong rule, as a control."""
    paths = [first_path(*row) for row in zip(*draft.lists, strict=True)]
    last_B = upload([logit_rows(path)[-1] for path in paths], out.logits.device)
    last_BV = out.logits[torch.arange(len(last_B), device=last_B.device), last_B]
    probs_BV = sampler.probabilities(last_BV[:, None])[:, 0]
    return Verdict.of(draft, paths, sampler.draw_next(probs_BV).tolist())


def first_path(tokens: list[int], parents: list[int]) -> list[int]:
    """The path from the root on which each node is the first child."""
    path: list[int] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token != ABSENT and parent == (path[-1] if path else -1):
            path.append(node)
    return path

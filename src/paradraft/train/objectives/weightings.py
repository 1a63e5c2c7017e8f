"""Weights of rows that depend on the rest of their chain, in which they are the tokens of one draft.

A row counts in decoding only if the drafts before it were accepted. With a per-row loss, a weighting makes most losses
of the literature: -E[τ] of DeepSpec is `acceptance` with `expected_length`, D-PACE (2605.18810) `cross_entropy` with
`expected_length:by=text:floor=0.5`, PARD-2's (An et al. 2026) a divergence with `chain`.

Weights have no gradient. A row without a label ends its chain, since a draft never gets past it: there the answer ends,
or the next token cannot be drafted.

Shape letters: m rows, V vocabulary, C chains, K depths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from paradraft.plugins import parse_settings
from paradraft.train.objectives.losses import acceptance


@dataclass(frozen=True)
class ChainTable:
    """The rows of whole chains as tables `[C, K]`, with 0 where there is no row.

    Args:
        chains: `[m]` index of each row's chain.
        depths: `[m]` each row's depth, from 0 on.
        weights: `[m]` weight of each row by its depth alone.
        logits: `[m, V]`.
        labels: `[m]`.
        is_right: `[m]` whether the drafter would draft the label.
        teacher: `[m, V]` the teacher's logits; None without one. If only some ids can be drafted, its probabilities
            are those given that one of these comes next.
    """

    chains: Tensor
    depths: Tensor
    weights: Tensor
    logits: Tensor
    labels: Tensor
    is_right: Tensor
    teacher: Tensor | None = None

    def table(self, values_m: Tensor) -> Tensor:
        """`[C, K]` values of rows."""
        shape = int(self.chains.max()) + 1, int(self.depths.max()) + 1
        table = torch.zeros(shape, dtype=values_m.dtype, device=values_m.device)
        table[self.chains, self.depths] = values_m
        return table

    def rows(self, values_CK: Tensor) -> Tensor:
        """`[m]` values of the rows in a table."""
        return values_CK[self.chains, self.depths]

    @cached_property
    def acceptance(self) -> Tensor:
        """`[C, K]` the share of drafts drawn from q that the rejection rule accepts."""
        assert self.teacher is not None
        return self.table(acceptance(self.logits, self.teacher))

    @cached_property
    def teacher_of_text(self) -> Tensor:
        """`[C, K]` the teacher's probability of the text's token."""
        assert self.teacher is not None
        return self._of_labels(self.teacher)

    @cached_property
    def drafter_of_text(self) -> Tensor:
        """`[C, K]` the drafter's probability of the text's token."""
        return self._of_labels(self.logits)

    def covered(self, siblings: int) -> Tensor:
        """`[C, K]` the teacher's probability of the drafter's likeliest `siblings` tokens together."""
        assert self.teacher is not None
        ids_mC = self.logits.topk(min(siblings, self.logits.shape[1]), dim=1).indices
        return self.table(self.teacher.float().softmax(1).gather(1, ids_mC).sum(1))

    def _of_labels(self, logits_mV: Tensor) -> Tensor:
        log_m = torch.nn.functional.cross_entropy(logits_mV.float(), self.labels, reduction="none")
        return self.table((-log_m).exp())


class Weighting(Protocol):
    """Weights of the rows of chains."""

    @property
    def needs_teacher(self) -> bool:
        """Whether it reads a teacher's probabilities."""

    def __call__(self, chains: ChainTable, /) -> Tensor:
        """The weights `[C, K]`, 0 where there is no row."""


@dataclass(frozen=True, kw_only=True)
class ByChain:
    """The teacher's probability of the tokens before a row in its chain (PARD-2), to a power."""

    power: float = 1.0
    needs_teacher: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.power < math.inf:
            raise ValueError(f"power={self.power}: use 0 or more")

    def __call__(self, chains: ChainTable) -> Tensor:
        """See `Weighting`."""
        return chains.table(chains.weights) * _before(chains.teacher_of_text) ** self.power


@dataclass(frozen=True, kw_only=True)
class ByExpectedLength:
    """The part of a draft's expected length that a row decides: its token, and those after it.

    With the probability a_i that the i-th token is accepted, and the weight b_m of depth m, the expected length is
    Σ_m b_m Π_{i≤m} a_i, and its slope in log a_j is Σ_{m≥j} b_m Π_{i≤m} a_i. With `average: per_depth`, b_m makes up
    for the rows that COD drops, so the sum is unbiased.

    Args:
        by: a is the rule's acceptance rate, the drafter's probability of the text's token, or the teacher's of the
            drafter's likeliest tokens, as in a tree (GTO, 2509.22134, whose reward counts a tree's shared tokens once
            for each branch; this length counts each node once).
        floor: a is raised to (1 - floor) a + floor, so that rows after unlikely ones are learnt too.
        siblings: the drafter's likeliest tokens with `by="siblings"`.
    """

    by: Literal["acceptance", "text", "siblings"] = "acceptance"
    floor: float = 0.0
    siblings: int = 3

    @property
    def needs_teacher(self) -> bool:
        """See `Weighting`."""
        return self.by != "text"

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor={self.floor}: use 0 to 1")
        if self.siblings < 1:
            raise ValueError(f"siblings={self.siblings}: use 1 or more")

    def __call__(self, chains: ChainTable) -> Tensor:
        """See `Weighting`."""
        accepted_CK = {
            "acceptance": lambda: chains.acceptance,
            "text": lambda: chains.drafter_of_text,
            "siblings": lambda: chains.covered(self.siblings),
        }[self.by]()
        is_row_CK = chains.table(torch.ones_like(chains.weights))
        reached_CK = (((1 - self.floor) * accepted_CK + self.floor) * is_row_CK).cumprod(1)
        return (chains.table(chains.weights) * reached_CK).flip(1).cumsum(1).flip(1) * is_row_CK


@dataclass(frozen=True, kw_only=True)
class ByFirstError:
    """1 up to the first row of a chain that drafts another token than the text's; `boost` is added there, and behind it
    weights fall by `decay` from row to row, as Draft-OPD's (2605.29343)."""

    boost: float = 0.0
    decay: float = 0.8
    needs_teacher: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.boost < math.inf or not 0 <= self.decay <= 1:
            raise ValueError(f"boost={self.boost}, decay={self.decay}: use a boost of 0 or more, and a decay of 0 to 1")

    def __call__(self, chains: ChainTable) -> Tensor:
        """See `Weighting`."""
        past_CK = (
            (~chains.table(chains.is_right)).cumsum(1).clamp(max=1).cumsum(1)
        )  # 0 before the first error, there 1, then 2, …
        factor_CK = self.decay ** (past_CK - 1).clamp(min=0)
        return chains.table(chains.weights) * (factor_CK + self.boost * (past_CK == 1))


@dataclass(frozen=True, kw_only=True)
class ByValidPrefix:
    """1 up to the first row of a chain that drafts another token than the text's, and 0 behind it."""

    needs_teacher: ClassVar[bool] = False

    def __call__(self, chains: ChainTable) -> Tensor:
        """See `Weighting`."""
        return ByFirstError(boost=0.0, decay=0.0)(chains)


def _before(shares_CK: Tensor) -> Tensor:
    """`[C, K]` products of the shares before each place of a chain."""
    return torch.nn.functional.pad(shares_CK[:, :-1].cumprod(1), (1, 0), value=1.0)


NONE = "none"
WEIGHTINGS: dict[str, type] = {
    "chain": ByChain,
    "expected_length": ByExpectedLength,
    "first_error": ByFirstError,
    "valid_prefix": ByValidPrefix,
}


def weighting_of(name: str) -> Weighting | None:
    """The weighting of a name with settings, as in `chain:power=0.5`; None for "none".

    Raises:
        ValueError: there is no such weighting, or a setting is wrong.

    >>> weighting_of("chain:power=0.5")
    ByChain(power=0.5)
    """
    kind, *settings = name.split(":")
    if name == NONE:
        return None
    if kind not in WEIGHTINGS:
        raise ValueError(f"weighting={name}: use one of {', '.join([NONE, *WEIGHTINGS])}")
    values = parse_settings(settings, WEIGHTINGS[kind], f"weighting={name}")
    try:
        weighting: Weighting = WEIGHTINGS[kind](**values)
    except ValueError as error:
        raise ValueError(f"weighting={name}: {error}") from None
    return weighting

"""What the reference says of each place of an answer: the probabilities of the tokens that could stand there.

The reference is the model itself, in a plain forward pass of `transformers` here; or another server, which tells the
likeliest tokens of each place and is taken at its word.

Shape letters: N places of an answer, C tokens that are told apart, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paradraft.audit.endpoint import Endpoint, Question
from paradraft.audit.recording import Case, Recording
from paradraft.audit.reference import (
    LARGEST_FACTORS,
    MEASURED,
    MOST_LARGEST,
    MOST_TYPICAL,
    OTHER_DTYPE,
    TYPICAL_FACTOR,
    Difference,
    can_compute_otherwise,
    difference,
    over_all,
    own_logits,
)
from paradraft.models.causal_lm import CausalLM
from paradraft.sampling_params import GREEDY
from paradraft.tree import ABSENT

LIKELIEST = 20
"""Of how many tokens a reference server is asked the probabilities; most servers tell no more."""
TOLD = Difference(largest=1.0, root_mean_square=0.1)
"""How far the logarithms of probabilities of two servers may be apart: what bfloat16 rounds away in large models."""
LEAST_REST = 1e-6
"""The least probability of all tokens together that a server does not tell: theirs are rounded too."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Probabilities at N places.

    Args:
        ids: `[C]` token ids in rising order; the first is `ABSENT` if it stands for all that the others leave.
        logprobs: `[N, C]` natural logarithms; N may be fewer than an answer has places.
    """

    ids: Tensor
    logprobs: Tensor
    aliases: Mapping[int, int] = field(default_factory=dict)
    """The column of tokens that are not told apart from others."""

    @property
    def has_rest(self) -> bool:
        """Whether a column stands for all other tokens."""
        return int(self.ids[0]) == ABSENT

    def columns(self, tokens: Sequence[int]) -> Tensor:
        """The column of each of the first N tokens, `[N]`."""
        tokens_N = torch.tensor(tokens[: len(self.logprobs)], device=self.ids.device)
        columns_N = torch.searchsorted(self.ids, tokens_N).clamp(max=len(self.ids) - 1)
        is_there_N = self.ids[columns_N] == tokens_N
        assert self.has_rest or bool(is_there_N.all()), "an id that the model does not have"
        columns_N = torch.where(is_there_N, columns_N, 0)
        for place, token in enumerate(tokens[: len(columns_N)]):
            if token in self.aliases:
                columns_N[place] = self.aliases[token]
        return columns_N

    def at_temperature(self, temperature: float) -> Table:
        """The same with all logits divided by a temperature."""
        return replace(self, logprobs=(self.logprobs / temperature).log_softmax(1))

    def merged(self, groups: Sequence[Collection[int]], *, summed: bool) -> Table:
        """The same with the first token of each group in place of all of them.

        Args:
            groups: ids that answers do not tell apart.
            summed: whether it gets the probabilities of all; else the largest of them.

        >>> table = Table(ids=torch.tensor([3, 5, 8]), logprobs=torch.tensor([[0.5, 0.3, 0.2]]).log())
        >>> table.merged([{5, 3}], summed=True).logprobs.exp()
        tensor([[0.8000, 0.0000, 0.2000]])
        """
        logprobs_NC, aliases = self.logprobs.clone(), dict(self.aliases)
        for group in groups:
            is_in_C = torch.isin(self.ids, torch.tensor(sorted(group), device=self.ids.device))
            if (columns := is_in_C.nonzero()[:, 0]).numel():
                part = self.logprobs[:, columns]
                logprobs_NC[:, columns] = -math.inf
                logprobs_NC[:, columns[0]] = part.logsumexp(1) if summed else part.amax(1)
                aliases |= dict.fromkeys(group, int(columns[0]))
        return replace(self, logprobs=logprobs_NC, aliases=aliases)


class Reference(Protocol):
    """Whose probabilities an audit compares with."""

    name: str
    """In words."""

    def table(self, prompt: list[int], tokens: list[int]) -> Table:
        """What it says of each place of an answer.

        Args:
            prompt: ids.
            tokens: of the answer, at least one.

        Raises:
            NotNumbersError: it says nothing that is a number.
            ValueError: it cannot be asked.
        """

    @property
    def explained(self) -> Difference:
        """How far from its logarithms of probabilities those of an honest server may be, going by rounding."""

    @property
    def limit(self) -> Difference:
        """How far they may be at most, however large rounding is."""

    @property
    def source(self) -> str:
        """Where `explained` comes from, in words."""


class ModelReference:
    """The model in a plain pass of its own over each text, here; see `paradraft.audit.reference`.

    Args:
        lm: has the model.
    """

    name = "the model's own pass"

    def __init__(self, lm: CausalLM) -> None:
        self._lm = lm
        self._rounding: list[Difference] = []
        self._variances: list[float] = []

    def table(self, prompt: list[int], tokens: list[int]) -> Table:
        """See `Reference`; measures the rounding of its dtype too, on the first of the texts."""
        case = Case(number=1, prompt=prompt, sampling=GREEDY)
        answer = Recording(tokens=tokens, logits=torch.empty(0))
        logits_NV = own_logits(self._lm, case, answer, all_rows=True)
        own_NV = logits_NV.double().log_softmax(1)
        self._variances.append(float(logits_NV[logits_NV.isfinite()].double().var()))
        if len(self._rounding) < MEASURED and can_compute_otherwise(self._lm):
            other_NV = own_logits(self._lm, case, answer, dtype=OTHER_DTYPE[self._lm.model.dtype], all_rows=True)
            self._rounding.append(difference(own_NV, other_NV.double().log_softmax(1)))
        ids_V = torch.arange(own_NV.shape[1], device=own_NV.device)
        return Table(ids=ids_V, logprobs=own_NV)

    @property
    def explained(self) -> Difference:
        """See `Reference`: a multiple of what the dtype rounds away."""
        if not self._rounding:
            return self.limit
        return over_all(self._rounding).times(LARGEST_FACTORS[self._lm.model.dtype], TYPICAL_FACTOR)

    @property
    def limit(self) -> Difference:
        """See `Reference`: a share of the deviation of the logits."""
        deviation = math.sqrt(sum(self._variances) / max(len(self._variances), 1))
        typical = MOST_TYPICAL[self._lm.model.dtype] * deviation
        return Difference(largest=MOST_LARGEST * typical, root_mean_square=typical)

    @property
    def source(self) -> str:
        """See `Reference`."""
        dtype = str(self._lm.model.dtype).removeprefix("torch.")
        return f"a multiple of what {dtype} rounds away in the model's own pass"


@dataclass(kw_only=True)
class ServerReference:
    """Another server of the same model.

    Args:
        endpoint: is asked to go on with each text, as token ids, for a token or as long as it agrees.
    """

    endpoint: Endpoint
    name: str = field(default="the reference server", init=False)
    explained: Difference = field(default=TOLD, init=False)
    limit: Difference = field(default=TOLD, init=False)
    source: str = field(default="what two servers in bfloat16 may differ by", init=False)

    def table(self, prompt: list[int], tokens: list[int]) -> Table:
        """See `Reference`. Ends early where the reference ends and does not say with which token."""
        rows: list[dict[int, float]] = []
        while len(rows) < len(tokens):
            begin = len(rows)
            asked = Question(
                number=1, prompt=prompt + tokens[:begin], max_new_tokens=len(tokens) - begin, likeliest=LIKELIEST
            )
            (served,) = self.endpoint.answers([asked], lambda _: None)
            # What it says is of the answer as long as it says the same, and of the place where it says something else.
            is_told = True
            for place in range(min(1 + _agreed(served.tokens, tokens[begin:]), len(served.tokens))):
                logprob = served.logprobs[place]
                is_told = is_told and logprob is not None
                if is_told and logprob is not None:
                    rows.append(served.likeliest[place] | {served.tokens[place]: logprob})
            if not is_told or len(rows) == begin:
                break
        return _sparse(rows[: len(tokens)])


def _agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers have in common at their beginning."""
    pairs = zip(a, b, strict=False)
    return next((place for place, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _sparse(rows: Sequence[dict[int, float]]) -> Table:
    """A table of the tokens that are told, and of all others together."""
    ids = sorted({token for row in rows for token in row})
    column = {token: index + 1 for index, token in enumerate(ids)}
    p_NC = torch.zeros(len(rows), 1 + len(ids), dtype=torch.float64)
    for place, row in enumerate(rows):
        for token, logprob in row.items():
            p_NC[place, column[token]] = math.exp(logprob)
        p_NC[place, 0] = max(1.0 - float(p_NC[place].sum()), LEAST_REST)
    return Table(ids=torch.tensor([ABSENT, *ids]), logprobs=p_NC.log().log_softmax(1))

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

from paradraft.audit.recording import Case, Recording
from paradraft.audit.reference import (
    MEASURED,
    OTHER_DTYPE,
    Difference,
    can_compute_otherwise,
    difference,
    explained_by,
    limit_of,
    over_all,
    own_logits,
)
from paradraft.audit.server.endpoint import Endpoint, Question, Served
from paradraft.models.causal_lm import CausalLM
from paradraft.sampling_params import GREEDY
from paradraft.tree import ABSENT

LIKELIEST = 20
"""Of how many tokens a reference server is asked the probabilities; most servers tell no more."""
TOLD = Difference(largest=1.0, root_mean_square=0.1)
"""How far the logarithms of probabilities of two servers may be apart: what bfloat16 rounds away in large models."""
PLACES = 64
"""Of which probabilities of all tokens are computed with at a time."""
LEAST_REST = 1e-6
"""The least probability of all tokens together that a server does not tell: theirs are rounded too."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Probabilities at N places.

    Args:
        ids: `[C]` token ids in rising order; the first is `ABSENT` if it stands for all that the others leave.
        logprobs: `[N, C]` natural logarithms.
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
        """The column of each of N tokens, `[N]`."""
        tokens_N = torch.tensor(tokens, device=self.ids.device)
        columns_N = torch.searchsorted(self.ids, tokens_N).clamp(max=len(self.ids) - 1)
        is_there_N = self.ids[columns_N] == tokens_N
        assert self.has_rest or bool(is_there_N.all()), "an id that the model does not have"
        columns_N = torch.where(is_there_N, columns_N, 0)
        for place, token in enumerate(tokens):
            if token in self.aliases:
                columns_N[place] = self.aliases[token]
        if self.has_rest:  # a token that is told at another place need not be told at this one
            is_told_N = self.logprobs.gather(1, columns_N[:, None])[:, 0] > -math.inf
            columns_N = torch.where(is_told_N, columns_N, 0)
        return columns_N

    def rows(self, begin: int, end: int) -> Table:
        """Only some of the places."""
        return replace(self, logprobs=self.logprobs[begin:end])

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

    def table(self, prompt: list[int], tokens: list[int], told: Sequence[float | None]) -> Table:
        """What it says of each place of an answer.

        Args:
            prompt: ids.
            tokens: of the answer, at least one.
            told: the logarithms of their probabilities, as the server tells them.

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
        self.lm = lm
        self._rounding: list[Difference] = []
        self._variances: list[float] = []
        self._all_rows = _Rows()

    def table(self, prompt: list[int], tokens: list[int], told: Sequence[float | None]) -> Table:
        """See `Reference`; measures the rounding of its dtype too, on the first of the texts."""
        rows = self.lm.model.config.get_text_config().vocab_size
        if wrong := [token for token in (*prompt, *tokens) if not 0 <= token < rows]:
            raise ValueError(
                f"the server tells of token {wrong[0]}, and the target has {rows}: is it the same model (--target)?"
            )
        case = Case(number=1, prompt=prompt, sampling=GREEDY)
        answer = Recording(tokens=tokens, logits=torch.empty(0))
        logits_NV = own_logits(self.lm, case, answer, all_rows=True)
        known = self.lm.vocab_size
        is_known = known < logits_NV.shape[1] and not self._all_rows.are_sampled(logits_NV, tokens, told, known)
        own_NV = _logprobs(logits_NV, known if is_known else None)
        some = logits_NV[:: -(-len(logits_NV) // PLACES)]
        self._variances.append(float(some[some.isfinite()].double().var()))
        if len(self._rounding) < MEASURED and can_compute_otherwise(self.lm):
            other_NV = own_logits(self.lm, case, answer, dtype=OTHER_DTYPE[self.lm.model.dtype], all_rows=True)
            pairs = zip(own_NV.split(PLACES), other_NV.split(PLACES), strict=True)
            apart = [difference(own, _logprobs(other, known if is_known else None)) for own, other in pairs]
            self._rounding.append(over_all(apart))
        ids_V = torch.arange(own_NV.shape[1], device=own_NV.device)
        return Table(ids=ids_V, logprobs=own_NV)

    @property
    def explained(self) -> Difference:
        """See `Reference`: a multiple of what the dtype rounds away."""
        if not self._rounding:
            return self.limit
        return explained_by(self.lm, self._rounding)

    @property
    def limit(self) -> Difference:
        """See `Reference`: a share of the deviation of the logits."""
        return limit_of(self.lm, self._variances)

    @property
    def source(self) -> str:
        """See `Reference`."""
        dtype = str(self.lm.model.dtype).removeprefix("torch.")
        return f"a multiple of what {dtype} rounds away in the model's own pass"


class _Rows:
    """Whether a server samples from all rows of the output head, or only from ids that are tokens.

    Embeddings have more rows than there are tokens, and servers do either. It shows in the probabilities that they
    tell; where both are the same, nothing depends on it.
    """

    def __init__(self) -> None:
        self._of_all = self._of_known = 0.0
        """Sums of squares of the differences from what is told."""
        self._has_others = False

    def are_sampled(self, logits_NV: Tensor, tokens: Sequence[int], told: Sequence[float | None], known: int) -> bool:
        """Going by all answers until now.

        Args:
            logits_NV: `[N, V]` of the model.
            tokens: of the answer.
            told: logarithms of their probabilities, by the server.
            known: ids from there on are no token.
        """
        self._has_others = self._has_others or max(tokens) >= known
        parts = logits_NV.split(PLACES)
        whole_N = torch.cat([part.double().logsumexp(1) for part in parts])
        known_N = torch.cat([part[:, :known].double().logsumexp(1) for part in parts])
        for place, (token, logprob) in enumerate(zip(tokens, told, strict=False)):
            if logprob is not None:
                logit = float(logits_NV[place, token])
                self._of_all += (logit - float(whole_N[place]) - logprob) ** 2
                self._of_known += (logit - float(known_N[place]) - logprob) ** 2
        return self._has_others or self._of_all <= self._of_known


def _logprobs(logits_NV: Tensor, known: int | None) -> Tensor:
    """Logarithms of probabilities `[N, V]` in float64; ids from `known` on have none."""
    if known is not None:
        logits_NV[:, known:] = -math.inf
    found_NV = torch.empty_like(logits_NV, dtype=torch.float64)
    for part, logprobs in zip(logits_NV.split(PLACES), found_NV.split(PLACES), strict=True):
        logprobs.copy_(part.double().log_softmax(1))
    return found_NV


@dataclass(kw_only=True)
class ServerReference:
    """Another server of the same model.

    Args:
        endpoint: is asked to go on with each text, as token ids.
    """

    endpoint: Endpoint
    name: str = field(default="the reference server", init=False)
    explained: Difference = field(default=TOLD, init=False)
    limit: Difference = field(default=TOLD, init=False)
    source: str = field(default="what two servers in bfloat16 may differ by", init=False)

    def table(self, prompt: list[int], tokens: list[int], told: Sequence[float | None]) -> Table:
        """See `Reference`. Where the reference does not say which token it prefers, it says nothing of the place."""
        (whole,) = self._answers(prompt, tokens, [0], len(tokens))
        # What it says is of the answer as long as it says the same, and of the place where it says something else.
        agreed = min(1 + _agreed(whole.tokens, tokens), len(whole.tokens), len(tokens))
        rows = [self._row(whole, place) for place in range(agreed)]
        places = range(agreed, len(tokens))
        rows += [self._row(served, 0) for served in self._answers(prompt, tokens, places, 1)]
        return _sparse(rows)

    def _answers(self, prompt: list[int], tokens: list[int], places: Sequence[int], most: int) -> list[Served]:
        """How it goes on with the text before each of some places."""
        asked = [
            Question(number=1, prompt=prompt + tokens[:place], max_new_tokens=most, likeliest=LIKELIEST)
            for place in places
        ]
        return self.endpoint.answers(asked, lambda _: None) if asked else []

    def _row(self, served: Served, place: int) -> dict[int, float]:
        """The tokens that are told of a place, with the logarithms of their probabilities."""
        logprob = served.logprobs[place] if place < len(served.tokens) else None
        if logprob is None:
            return {}
        row = served.likeliest[place] | {served.tokens[place]: logprob}
        if len(row) < 2:
            raise ValueError(
                f"endpoint {self.endpoint.url} tells no likeliest tokens beside its own (top_logprobs), and without "
                "them it cannot be the reference"
            )
        return row


def _agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers have in common at their beginning."""
    pairs = zip(a, b, strict=False)
    return next((place for place, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _sparse(rows: Sequence[dict[int, float]]) -> Table:
    """A table of the tokens that are told, and of all others together; where nothing is told these have all."""
    ids = sorted({token for row in rows for token in row})
    column = {token: index + 1 for index, token in enumerate(ids)}
    p_NC = torch.zeros(len(rows), 1 + len(ids), dtype=torch.float64)
    for place, row in enumerate(rows):
        for token, logprob in row.items():
            p_NC[place, column[token]] = math.exp(logprob)
        p_NC[place, 0] = max(1.0 - float(p_NC[place].sum()), LEAST_REST)
    return Table(ids=torch.tensor([ABSENT, *ids]), logprobs=p_NC.log().log_softmax(1))

"""Tables of the reference's probabilities at each position of an answer.

The reference is the model itself, in a plain forward pass of `transformers` here; or another server, which gives the
likeliest tokens of each position and is taken at its word.

Shape letters: N positions of an answer, C tokens that are told apart, V vocabulary.
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
from paradraft.audit.server.endpoint import AuditedServer, Served, ServerPrompt
from paradraft.models.causal_lm import CausalLM
from paradraft.sampling_params import GREEDY
from paradraft.tree import ABSENT

LIKELIEST = 20
"""The `top_logprobs` of a reference server; most servers give no more."""
BETWEEN_SERVERS = Difference(largest=1.0, root_mean_square=0.1)
"""Allowed difference of the log-probabilities of two servers: what bfloat16 rounds away in large models."""
POSITIONS = 64
"""Positions at a time whose probabilities of all tokens are computed."""
LEAST_REST = 1e-6
"""Least sum of the probabilities that a server does not give: those that it gives are rounded."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Probabilities at N positions.

    Args:
        ids: `[C]` token ids in rising order; the first is `ABSENT` if it is the rest of the vocabulary.
        logprobs: `[N, C]` natural logarithms.
    """

    ids: Tensor
    logprobs: Tensor
    aliases: Mapping[int, int] = field(default_factory=dict)
    """The column of each token that is not told apart from others."""

    @property
    def has_rest(self) -> bool:
        """Whether the first column is the rest of the vocabulary."""
        return int(self.ids[0]) == ABSENT

    def columns(self, tokens: Sequence[int]) -> Tensor:
        """The column of each of N tokens, `[N]`."""
        tokens_N = torch.tensor(tokens, device=self.ids.device)
        columns_N = torch.searchsorted(self.ids, tokens_N).clamp(max=len(self.ids) - 1)
        is_there_N = self.ids[columns_N] == tokens_N
        assert self.has_rest or bool(is_there_N.all()), "an id that the model does not have"
        columns_N = torch.where(is_there_N, columns_N, 0)
        for position, token in enumerate(tokens):
            if token in self.aliases:
                columns_N[position] = self.aliases[token]
        if self.has_rest:  # a token known at another position may be unknown here
            is_known_N = self.logprobs.gather(1, columns_N[:, None])[:, 0] > -math.inf
            columns_N = torch.where(is_known_N, columns_N, 0)
        return columns_N

    def rows(self, begin: int, end: int) -> Table:
        """Positions from `begin` to before `end`."""
        return replace(self, logprobs=self.logprobs[begin:end])

    def at_temperature(self, temperature: float) -> Table:
        """The table with all logits divided by a temperature."""
        return replace(self, logprobs=(self.logprobs / temperature).log_softmax(1))

    def merged(self, groups: Sequence[Collection[int]], *, summed: bool) -> Table:
        """The table with each group of tokens merged into its first.

        Args:
            groups: ids that answers do not tell apart.
            summed: whether the first token gets the sum of the probabilities; else the largest of them.

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
    """The model or server whose probabilities an audit compares with."""

    name: str
    """For reports."""

    def table(self, prompt: list[int], tokens: list[int], logprobs: Sequence[float | None]) -> Table:
        """Its probabilities at each position of an answer.

        Args:
            tokens: of the answer, at least one.
            logprobs: of the tokens, by the audited server.

        Raises:
            NotNumbersError: its probabilities are not numbers.
            ValueError: it does not answer.
        """

    @property
    def explained(self) -> Difference:
        """The difference from its log-probabilities that rounding explains for a correct server."""

    @property
    def limit(self) -> Difference:
        """The largest allowed difference, however large rounding is."""

    @property
    def source(self) -> str:
        """The source of `explained`, in words."""


class ModelReference:
    """The model here, in a plain pass over each text; see `paradraft.audit.reference`."""

    name = "the model's own pass"

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self._rounding: list[Difference] = []
        self._variances: list[float] = []
        self._all_rows = _Rows()

    def table(self, prompt: list[int], tokens: list[int], logprobs: Sequence[float | None]) -> Table:
        """See `Reference`; measures the rounding of its dtype too, on the first texts."""
        rows = self.lm.model.config.get_text_config().vocab_size
        if unknown := [token for token in (*prompt, *tokens) if not 0 <= token < rows]:
            raise ValueError(
                f"the server tells of token {unknown[0]}, and the target has {rows}: is it the same model (--target)?"
            )
        case = Case(number=1, prompt=prompt, sampling=GREEDY)
        answer = Recording(tokens=tokens, logits=torch.empty(0))
        logits_NV = own_logits(self.lm, case, answer, all_rows=True)
        known = self.lm.vocab_size
        is_known = known < logits_NV.shape[1] and not self._all_rows.are_sampled(logits_NV, tokens, logprobs, known)
        own_NV = _logprobs(logits_NV, known if is_known else None)
        some = logits_NV[:: -(-len(logits_NV) // POSITIONS)]
        self._variances.append(float(some[some.isfinite()].double().var()))
        if len(self._rounding) < MEASURED and can_compute_otherwise(self.lm):
            other_NV = own_logits(self.lm, case, answer, dtype=OTHER_DTYPE[self.lm.model.dtype], all_rows=True)
            pairs = zip(own_NV.split(POSITIONS), other_NV.split(POSITIONS), strict=True)
            differences = [difference(own, _logprobs(other, known if is_known else None)) for own, other in pairs]
            self._rounding.append(over_all(differences))
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
    """Finds out whether a server samples from all rows of the output head, or only from ids that are tokens.

    Output heads have more rows than there are tokens, and servers do either. Their log-probabilities show it; where
    both are the same, nothing depends on it.
    """

    def __init__(self) -> None:
        self._of_all = self._of_known = 0.0
        """Sums of squares of the differences from the server's log-probabilities."""
        self._has_others = False

    def are_sampled(
        self, logits_NV: Tensor, tokens: Sequence[int], logprobs: Sequence[float | None], known: int
    ) -> bool:
        """Whether the padding rows, ids from `known` on, are sampled too, by all answers until now."""
        self._has_others = self._has_others or max(tokens) >= known
        parts = logits_NV.split(POSITIONS)
        whole_N = torch.cat([part.double().logsumexp(1) for part in parts])
        known_N = torch.cat([part[:, :known].double().logsumexp(1) for part in parts])
        for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=False)):
            if logprob is not None:
                logit = float(logits_NV[position, token])
                self._of_all += (logit - float(whole_N[position]) - logprob) ** 2
                self._of_known += (logit - float(known_N[position]) - logprob) ** 2
        return self._has_others or self._of_all <= self._of_known


def _logprobs(logits_NV: Tensor, known: int | None) -> Tensor:
    """Log-probabilities `[N, V]` in float64; ids from `known` on have none."""
    if known is not None:
        logits_NV[:, known:] = -math.inf
    logprobs_NV = torch.empty_like(logits_NV, dtype=torch.float64)
    for part, logprobs in zip(logits_NV.split(POSITIONS), logprobs_NV.split(POSITIONS), strict=True):
        logprobs.copy_(part.double().log_softmax(1))
    return logprobs_NV


@dataclass(kw_only=True)
class ServerReference:
    """Another server of the same model, which continues each text, sent as token ids."""

    endpoint: AuditedServer
    name: str = field(default="the reference server", init=False)
    explained: Difference = field(default=BETWEEN_SERVERS, init=False)
    limit: Difference = field(default=BETWEEN_SERVERS, init=False)
    source: str = field(default="what two servers in bfloat16 may differ by", init=False)

    def table(self, prompt: list[int], tokens: list[int], logprobs: Sequence[float | None]) -> Table:
        """See `Reference`. Positions whose preferred token the server does not give have no probabilities."""
        (answer,) = self._answers(prompt, tokens, [0], len(tokens))
        # Its answer covers the positions up to and with the first different token; each later one is asked for.
        agreed = min(1 + _common_prefix(answer.tokens, tokens), len(answer.tokens), len(tokens))
        rows = [self._row(answer, position) for position in range(agreed)]
        positions = range(agreed, len(tokens))
        rows += [self._row(served, 0) for served in self._answers(prompt, tokens, positions, 1)]
        return _sparse(rows)

    def _answers(self, prompt: list[int], tokens: list[int], positions: Sequence[int], most: int) -> list[Served]:
        """Its continuations of the text before each of some positions."""
        questions = [
            ServerPrompt(number=1, prompt=prompt + tokens[:position], max_new_tokens=most, likeliest=LIKELIEST)
            for position in positions
        ]
        return self.endpoint.answers(questions, lambda _: None) if questions else []

    def _row(self, served: Served, position: int) -> dict[int, float]:
        """The tokens given for a position, with their log-probabilities."""
        logprob = served.logprobs[position] if position < len(served.tokens) else None
        if logprob is None:
            return {}
        row = served.likeliest[position] | {served.tokens[position]: logprob}
        if len(row) < 2:
            raise ValueError(
                f"endpoint {self.endpoint.url} tells no likeliest tokens beside its own (top_logprobs), and without "
                "them it cannot be the reference"
            )
        return row


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two answers."""
    pairs = zip(a, b, strict=False)
    return next((index for index, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _sparse(rows: Sequence[dict[int, float]]) -> Table:
    """A table of the tokens that are known, and of all others together, which have everything where none is known."""
    ids = sorted({token for row in rows for token in row})
    column = {token: index + 1 for index, token in enumerate(ids)}
    p_NC = torch.zeros(len(rows), 1 + len(ids), dtype=torch.float64)
    for position, row in enumerate(rows):
        for token, logprob in row.items():
            p_NC[position, column[token]] = math.exp(logprob)
        p_NC[position, 0] = max(1.0 - float(p_NC[position].sum()), LEAST_REST)
    return Table(ids=torch.tensor([ABSENT, *ids]), logprobs=p_NC.log().log_softmax(1))

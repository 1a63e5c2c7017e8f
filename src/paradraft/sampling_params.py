"""Sampling parameters of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from paradraft.errors import one_line, real_number, whole_number

if TYPE_CHECKING:
    from torch import Tensor

MOST_BIAS = 10_000.0
"""Largest bias or penalty: far beyond any logit, and far from the limits of float32."""
Draws = Literal["noise", "numbers", "likeliest"]
"""How drafters draw for a verification rule; see `paradraft.core.Drafting`."""


class LogitsProcessor(Protocol):
    """As in `transformers`."""

    def __call__(self, tokens_MT: Tensor, logits_MV: Tensor, /) -> Tensor:
        """Maps `[M, T]` token ids and the `[M, V]` logits after them to new `[M, V]` logits.

        M changes from call to call; logits of another shape fail the request.
        """
        ...


@runtime_checkable
class ForcingProcessor(LogitsProcessor, Protocol):
    """A processor that knows which tokens must come next, such as a grammar; drafters may ask it."""

    def forced(self, answer: list[int], most: int, /) -> list[int]:
        """At most `most` tokens that are likely to follow an answer; [] where several may.

        A drafter may call it in another thread. Tokens are verified: a wrong token costs time and changes no text.

        Args:
            answer: committed tokens after the prompt, without an end token.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters: how the next token is chosen from the logits.

    They are applied in this order: logit bias, penalties, processors, temperature, top-k, top-p, min-p. With the match
    rule the same seed gives the same text with and without speculation.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, in (0, 1].
        min_p: keep tokens whose probability is at least this share of the largest one, in [0, 1].
        repetition_penalty: above 1 makes tokens of prompt and answer less likely (Keskar et al. 2019).
        presence_penalty: subtracted from the logit of every token in the answer.
        frequency_penalty: subtracted from the logit of a token once per occurrence in the answer.
        logit_bias: token id to the number added to its logit; -inf forbids the token.
        processors: a list of `LogitsProcessor`s, such as a `LogitsProcessorList` of `transformers`. Each is called with
            the text of every drafted position and must be a function of its two arguments. It is not called for
            positions after an end token or beyond the length limit, but may be for positions after a stop string.
            Those that are `ForcingProcessor`s too can be asked for drafts.
        seed: of the random numbers of this request.

    Raises:
        ValueError: a value is out of range or has the wrong type.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7).is_greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    processors: Sequence[LogitsProcessor] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in names:
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        if self.temperature != 0.0 and not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(f"temperature={self.temperature}: use 0 (greedy) or a number from 0.000001 to 1000000")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: use 0 (keep all tokens) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: use a number above 0 and at most 1 (keep all tokens)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: use a number from 0 (keep all tokens) to 1")
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: use a number from 0.000001 to 1000000; 1 is no penalty"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_BIAS:
                raise ValueError(
                    f"{name}={getattr(self, name)}: use a number of at most {MOST_BIAS:g}; 0 is no penalty"
                )
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: use a whole number that fits in 64 bits")
        # As tuples, so that settings can be compared and hashed.
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "processors", _processors(self.processors))

    @property
    def settings(self) -> tuple[object, ...]:
        """All settings but the seed: rows with equal settings are processed together."""
        values = (getattr(self, field.name) for field in fields(self) if field.name not in ("seed", "processors"))
        # Processors need not be hashable, and equal ones need not do the same.
        return *values, *map(id, self.processors)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and bias, by id."""
        return tuple(dict(self.logit_bias).items())

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def reads_text(self) -> bool:
        """Whether the logits of a position depend on the tokens before it beyond the model."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.processors
        )

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before the temperature is applied."""
        return self.reads_text or bool(self.logit_bias)

    @property
    def may_forbid(self) -> bool:
        """Whether it may leave a position no token."""
        return bool(self.processors) or any(bias == -math.inf for _, bias in self.biases)

    @property
    def is_plain(self) -> bool:
        """Whether only a temperature, if anything, is applied to the model's logits."""
        has_filters = not self.is_greedy and bool(self.top_k or self.top_p < 1.0 or self.min_p)
        return not has_filters and not self.changes_logits

    @property
    def is_plain_greedy(self) -> bool:
        """Whether tokens are the argmax of the model's logits."""
        return self.is_greedy and self.is_plain


def _biases(setting: object) -> tuple[tuple[int, float], ...]:
    example = "use token ids and numbers, such as {50256: -100.0}"
    pairs = list(setting.items()) if isinstance(setting, Mapping) else setting
    kinds = (list, tuple)
    if not isinstance(pairs, kinds) or not all(isinstance(pair, kinds) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"logit_bias={one_line(setting)}: {example}")
    biases: dict[int, float] = {}
    for key, value in pairs:
        try:
            token, bias = whole_number("token", key), real_number("bias", value)
        except ValueError:
            raise ValueError(f"logit_bias: {one_line(key)}: {one_line(value)}: {example}") from None
        if token < 0 or not (abs(bias) <= MOST_BIAS or bias == -math.inf):
            raise ValueError(
                f"logit_bias: {token}: {bias}: use a token id and a number of at most {MOST_BIAS:g}, or -inf"
            )
        if token in biases:
            raise ValueError(f"logit_bias: token {token} has two biases: give it one")
        biases[token] = bias
    return tuple(sorted(biases.items()))


def _processors(processors: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(processors, (list, tuple)):
        raise ValueError(f"processors={one_line(processors)}: use a list of functions, such as [processor]")
    for processor in processors:
        if not callable(processor):
            raise ValueError(f"processors: {one_line(processor)} cannot be called: use a list of functions")
    return tuple(processors)


GREEDY = Sampling()

"""Prompt lookup: drafts the tokens that followed the same n-gram earlier in the text.

No model: the longest suffix of the committed tokens, at most `max_ngram` long, that occurs earlier in the text is
looked up, and the tokens after its latest earlier occurrence are the draft (Saxena 2023, "Prompt Lookup Decoding"). The
settings that ParallelSpec compares with, n-grams of 3 tokens and 10 drafted tokens (Xiao et al. 2024, section 5), are
`--drafter ngram:max_ngram=3 -k 10`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paradraft.drafters.parts.estimating import Estimating, Node, chain_of
from paradraft.drafters.parts.match_chance import LONG, chain_chances
from paradraft.drafters.parts.text_drafter import TextDrafter
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.traits import Serving, Traits


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter.

    Args:
        max_ngram: longest suffix to look for, at least 1.
    """

    max_ngram: int = 3

    def __post_init__(self) -> None:
        if self.max_ngram < 1:
            raise ValueError(f"max_ngram={self.max_ngram}: use at least 1")


class NgramDrafter(TextDrafter, Estimating):
    """Drafts from the committed tokens."""

    traits = Traits(label="n-gram", words="copies earlier text", estimates=True)
    # By default vLLM matches exactly five tokens, and would draft less than planned.
    serving = Serving(vllm="ngram", settings={"prompt_lookup_max": "max_ngram"}, options={"prompt_lookup_min": 1})

    def __init__(self, config: Config) -> None:
        self.config = config

    def grow(self, lengths: Sequence[int]) -> list[list[Node]]:
        """Chains by `lookup`; rows without a match draft nothing."""
        rows = []
        for text, k in zip(self.texts, lengths, strict=True):
            end = lookup(text, self.config.max_ngram) if k else len(text)
            tokens = text[end : end + k]
            rows.append(chain_of(tokens, chain_chances(len(tokens), matched(text, end), factor=self.worth.factor)))
        return rows


def lookup(text: list[int], max_ngram: int) -> int:
    """The end of the latest earlier occurrence of the longest known suffix; the text's end without any.

    >>> lookup([1, 2, 3, 9, 1, 2], 3), lookup([1, 2, 3], 3)
    (2, 3)
    """
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return start + size
    return len(text)


def matched(text: list[int], end: int) -> int:
    """How many tokens before an earlier end are those before the text's, at most `LONG`.

    >>> matched([7, 1, 2, 3, 8, 1, 2], 3)
    2
    """
    most = min(end, LONG)
    return next((size for size in range(most) if text[end - 1 - size] != text[-1 - size]), most)


def build(config: Config, target: Target, runtime: Runtime) -> NgramDrafter:
    """Builds the drafter; target and runtime are not used."""
    return NgramDrafter(config)

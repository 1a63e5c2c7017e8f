"""Prompt lookup: drafts the tokens that followed the same n-gram earlier in the text.

No model: the longest suffix of the committed tokens, at most `max_ngram` long, that occurs earlier in the text is
looked up, and the tokens after its latest earlier occurrence are the draft (Saxena 2023, "Prompt Lookup Decoding"). The
settings that ParallelSpec compares with, n-grams of 3 tokens and 10 drafted tokens (Xiao et al. 2024, section 5), are
`--drafter ngram:max_ngram=3 -k 10`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paradraft import ragged
from paradraft.core import Draft
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


class NgramDrafter(TextDrafter):
    """Drafts from the committed tokens."""

    traits = Traits(label="n-gram", words="copies earlier text")
    # By default vLLM matches exactly five tokens, and would draft less than planned.
    serving = Serving(vllm="ngram", settings={"prompt_lookup_max": "max_ngram"}, options={"prompt_lookup_min": 1})

    def __init__(self, config: Config) -> None:
        self.config = config

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Drafts by `lookup`; rows without a match draft nothing."""
        drafts = [lookup(text, k, self.config.max_ngram) for text, k in zip(self.texts, lengths, strict=True)]
        return Draft.chain(ragged.from_lists(drafts, self.device))


def lookup(text: list[int], k: int, max_ngram: int) -> list[int]:
    """The at most `k` tokens after the latest earlier occurrence of the longest known suffix.

    >>> lookup([1, 2, 3, 9, 1, 2], 2, 3)
    [3, 9]
    >>> lookup([1, 2, 3], 2, 3)
    []
    """
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        suffix = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == suffix:
                return text[start + size : start + size + k]
    return []


def build(config: Config, target: Target, runtime: Runtime) -> NgramDrafter:
    """Builds the drafter; target and runtime are not used."""
    return NgramDrafter(config)

"""Loads the training samples of a run from text and conversations; `tokenized.py` handles a single record."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from paradraft.data.chat import dated
from paradraft.data.mix import Source, as_source, share
from paradraft.data.samples import Sample
from paradraft.data.tokens.token_cache import TokenCache, tokenized_records
from paradraft.data.tokens.tokenized import Long, Tokenization, Tokenized
from paradraft.text.chat_template import ChatTemplate, check_variables

NAMED = 5
"""Most samples that a warning or error names."""


def load_samples(
    sources: Sequence[Path | Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    long: Long = "auto",
    columns: Mapping[str, str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    date_string: str | None = None,
    day: date | None = None,
    end_ids: Collection[int] = (),
    skip_unlabelled: bool = False,
    seed: int = 0,
    cache: TokenCache | None = None,
) -> list[Sample]:
    """Reads and tokenizes all sources.

    Warns if labels are lost because samples are too long, or if pieces begin in the middle of an answer.

    Args:
        long: how longer ones are cut, see `Tokenization`.
        columns: the sources' names for the columns of `paradraft.sources.records`.
        date_string: written by the template as today's date.
        day: today's date if there is no `date_string`; None for the actual day.
        end_ids: tokens that end a turn, besides the tokenizer's end-of-text.
        skip_unlabelled: skip samples without labels instead of raising.
        seed: of the choice of `most` samples of a source.
        cache: of the tokens of large sources; by default next to the cache of `datasets`.

    Raises:
        ValueError: a source does not exist or cannot be read, a record (named by its index, from 1) is broken,
            samples have no label, or the chat template does not know a variable.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-text token, so the end of a text cannot be learned")
    ends = frozenset([tokenizer.eos_token_id, *end_ids])
    check_variables(chat_template_kwargs or {}, tokenizer)
    undated = ChatTemplate(tokenizer=tokenizer, variables=chat_template_kwargs or {}, end_ids=ends)
    template = dated(undated, date_string, day)
    how = Tokenization(template=template, max_length=max_length, long=long, columns=columns or {})
    samples: list[Sample] = []
    cuts = _Cuts(max_length=max_length)
    mix = list(map(as_source, sources))
    for source in mix:
        source_samples: list[Sample] = []
        for record in tokenized_records(source.path, how, cache or TokenCache(), day=day):
            source_samples += record.samples
            cuts.note(record)
        samples += share(source_samples, source, seed)
    if not skip_unlabelled:
        cuts.check_labels()
    for warning in cuts.warnings():
        warnings.warn(warning, stacklevel=2)
    if not samples:
        raise ValueError(
            f"nothing to learn in {', '.join(str(source.path) for source in mix)}: no sample has a token to predict"
        )
    for warning in _ignored(chat_template_kwargs, date_string, cuts.has_talks, writes_date=template is not undated):
        warnings.warn(warning, stacklevel=2)
    return samples


def _ignored(
    variables: Mapping[str, Any] | None, date_string: str | None, has_talks: bool, *, writes_date: bool
) -> Iterator[str]:
    """Warnings about settings of the chat template without effect."""
    if variables and not has_talks:
        yield "chat_template_kwargs is ignored without conversations in the data"
    if date_string is not None and not (has_talks and writes_date):
        why = "the model's chat template writes no date" if has_talks else "there are no conversations in the data"
        yield f"date_string={date_string} is ignored: {why}"


@dataclass(kw_only=True)
class _Cuts:
    """Counts what is lost because samples are too long; the counts are those of `Tokenized`.

    Args:
        empty: locations of samples that have no label left once truncated.
    """

    max_length: int
    samples: int = 0
    truncated: int = 0
    labels: int = 0
    lost: int = 0
    empty: list[str] = field(default_factory=list)
    unlabelled: list[str] = field(default_factory=list)
    headless: int = 0
    has_talks: bool = False

    def note(self, record: Tokenized) -> None:
        self.samples += record.wholes
        self.truncated += record.truncated
        self.labels += record.labels
        self.lost += record.lost
        self.empty += [record.place] * record.empty
        self.unlabelled += [record.place] * record.is_unlabelled
        self.has_talks |= record.is_talk
        self.headless += record.headless

    def check_labels(self) -> None:
        if self.unlabelled:
            raise ValueError(
                f"nothing is a label in {len(self.unlabelled)} samples ({_some(self.unlabelled)}): remove them, or set "
                "skip_unlabelled=true"
            )

    def warnings(self) -> list[str]:
        lines = []
        if self.truncated:
            lines.append(
                f"{self.truncated} of {self.samples} samples are longer than max_length={self.max_length} and were "
                f"truncated, {self.lost / self.labels:.1%} of all labels are lost: raise max_length if memory allows"
            )
        if self.empty:
            lines.append(
                f"{len(self.empty)} samples were left out, because their prompt alone fills max_length="
                f"{self.max_length} ({_some(self.empty)}): raise max_length if memory allows"
            )
        if self.headless:
            lines.append(
                f"long=split: {self.headless} pieces begin in the middle of a conversation or an answer, without what "
                "the target read before; raise max_length, or set long=truncate"
            )
        return lines


def _some(places: list[str]) -> str:
    return ", ".join(places[:NAMED]) + (", …" if len(places) > NAMED else "")

"""Training samples from text and conversations.

A record is `{"text": …}`, `{"prompt": …, "response": …}`, `{"messages": [{"role": …, "content": …}, …]}`,
the same with ShareGPT's names (`conversations`, `from`, `value`) or AMD's (`conversation`, `human`,
`assistant`), or `{"user": …, "assistant": …}`, one turn of a conversation. Of text every token is a label;
of a prompt and its response only the response is, and the end-of-text after it; of a conversation the
assistant's turns, all of them, as the model's chat template marks them, and their ends. A record that says
`"finish_reason": "length"` was cut: nothing is learnt after its response or its last turn.

A sample with more than `max_length` tokens is truncated or split. Split pieces of an answer begin in the middle of it,
without the prompt that the target read there, so only plain text is split unless the recipe says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.data.chat import conversation_samples, dated
from paradraft.data.records import conversation_of, records, renamed
from paradraft.data.samples import Sample, group_of, is_longer, pieces, truncated
from paradraft.models.chat_template import ChatTemplate, check_variables
from paradraft.models.tokenization import encode_continuation, encode_prompt

Long = Literal["auto", "truncate", "split"]
NAMED = 5
"""How many samples a complaint names."""


def load_samples(
    sources: list[Path],
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
) -> list[Sample]:
    """Reads all sources; samples have at most `max_length` tokens.

    Warns if the ends of answers, or whole answers, are not learnt because they are too long, or if pieces begin in the
    middle of an answer.

    Args:
        sources: files, or Hugging Face datasets.
        tokenizer: the model's, with its chat template.
        max_length: most tokens of a sample.
        long: what becomes of longer ones: "truncate" keeps the beginning, "split" cuts into pieces that overlap by one
            token, "auto" splits plain text and truncates what has a prompt or turns.
        columns: what the sources call the names in `paradraft.data.records`, if otherwise.
        chat_template_kwargs: variables of the chat template.
        date_string: what the template writes as today's date, if it writes one.
        day: what it takes for today otherwise; None for the day that it is.
        end_ids: tokens that end a turn, besides the tokenizer's end-of-text.
        skip_unlabelled: leave samples out in which nothing is a label.

    Raises:
        ValueError: a source does not exist or cannot be read, a record is broken (named by number), samples
            have nothing to learn, or the chat template does not know a variable.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-text token, so the end of a text cannot be learned")
    ends = frozenset([tokenizer.eos_token_id, *end_ids])
    check_variables(chat_template_kwargs or {}, tokenizer)
    undated = ChatTemplate(tokenizer=tokenizer, variables=chat_template_kwargs or {}, end_ids=ends)
    template = dated(undated, date_string, day)
    samples: list[Sample] = []
    unlabelled: list[str] = []
    cuts = _Cuts(max_length=max_length)
    has_talks = False
    for source in sources:
        for place, row in records(source, "training data"):
            try:
                record = renamed(row, columns or {})
                found = _from_record(record, template)
            except (ValueError, TypeError, KeyError, TemplateError) as error:
                raise ValueError(f"{place}: {error}") from None
            has_talks = has_talks or not _is_text(record)
            group = group_of(found[0]) if found else 0
            is_plain = "text" in record
            splits = is_plain if long == "auto" else long == "split"
            parts: list[Sample] = []
            for sample in found:
                cut = (pieces if splits else truncated)(sample, max_length, group=group)
                parts += cuts.noted(sample, list(cut), place, is_plain=is_plain, splits=splits)
            samples += parts
            if not parts and not any(any(sample.is_label[1:]) for sample in found):
                unlabelled.append(place)
    if unlabelled and not skip_unlabelled:
        raise ValueError(
            f"nothing is a label in {len(unlabelled)} samples ({_some(unlabelled)}): remove them, or set "
            "skip_unlabelled=true"
        )
    for warning in cuts.warnings():
        warnings.warn(warning, stacklevel=2)
    if not samples:
        raise ValueError(f"nothing to learn in {', '.join(map(str, sources))}: no sample has a token to predict")
    if chat_template_kwargs and not has_talks:
        warnings.warn("chat_template_kwargs is ignored without conversations in the data", stacklevel=2)
    if date_string is not None and (template is undated or not has_talks):
        why = "the model's chat template writes no date" if has_talks else "there are no conversations in the data"
        warnings.warn(f"date_string={date_string} is ignored: {why}", stacklevel=2)
    return samples


@dataclass(kw_only=True)
class _Cuts:
    """What is lost because samples are too long.

    Args:
        max_length: most tokens of a sample.
        samples: how many there are.
        truncated: how many of them are truncated and have labels left.
        labels: of all samples.
        lost: labels that are truncated away.
        empty: places of samples that are truncated and have no label left.
        headless: pieces that begin after the beginning of a record with a prompt or turns.
    """

    max_length: int
    samples: int = 0
    truncated: int = 0
    labels: int = 0
    lost: int = 0
    empty: list[str] = field(default_factory=list)
    headless: int = 0

    def noted(self, whole: Sample, parts: list[Sample], place: str, *, is_plain: bool, splits: bool) -> list[Sample]:
        """Counts what becomes of one sample, and returns its parts."""
        self.samples += 1
        self.labels += sum(whole.is_label)
        if is_longer(whole, self.max_length):
            if splits:
                begins = bool(parts) and parts[0].tokens == whole.tokens[: self.max_length]
                self.headless += 0 if is_plain else len(parts) - begins
            else:
                self.lost += sum(whole.is_label) - sum(sum(part.is_label) for part in parts)
                self.truncated += bool(parts)
                self.empty += [] if parts else [place]
        return parts

    def warnings(self) -> list[str]:
        """One line for each thing that is lost."""
        found = []
        if self.truncated:
            found.append(
                f"{self.truncated} of {self.samples} samples are longer than max_length={self.max_length} and were "
                f"truncated, {self.lost / self.labels:.1%} of all labels are lost: raise max_length if memory allows"
            )
        if self.empty:
            found.append(
                f"{len(self.empty)} samples were left out, because their prompt alone fills max_length="
                f"{self.max_length} ({_some(self.empty)}): raise max_length if memory allows"
            )
        if self.headless:
            found.append(
                f"long=split: {self.headless} pieces begin in the middle of a conversation or an answer, without what "
                "the target read before; raise max_length, or set long=truncate"
            )
        return found


def _some(places: list[str]) -> str:
    return ", ".join(places[:NAMED]) + (", …" if len(places) > NAMED else "")


def _is_text(record: Mapping[str, Any]) -> bool:
    """Whether a record, which can be read, is no conversation."""
    return "text" in record or {"prompt", "response"} <= record.keys()


def _from_record(record: Any, template: ChatTemplate) -> list[Sample]:
    tokenizer, is_cut = template.tokenizer, record.get("finish_reason") == "length"
    match record:
        case {"text": str(text)}:
            return [_from_text(text, tokenizer)]
        case {"prompt": str(prompt), "response": str(response)}:
            return [_from_response(prompt, response, tokenizer, is_cut=is_cut)]
    if (messages := conversation_of(record)) is not None:
        return conversation_samples(messages, template, is_cut=is_cut)
    raise ValueError('expected {"text": …}, {"prompt": …, "response": …} or {"messages": […]}')


def _from_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = _ended(encode_prompt(text, tokenizer), tokenizer)
    return Sample(tokens=tokens, is_label=[True] * len(tokens))


def _from_response(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, *, is_cut: bool) -> Sample:
    question, written = encode_prompt(prompt, tokenizer), encode_continuation(response, tokenizer)
    answer = written if is_cut else _ended(written, tokenizer)
    return Sample(tokens=question + answer, is_label=[False] * len(question) + [True] * len(answer))


def _ended(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """With one end-of-text after it, which may stand in the text already."""
    end = [tokenizer.eos_token_id]
    return tokens if tokens[-1:] == end else tokens + end

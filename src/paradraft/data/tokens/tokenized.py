"""Tokenizes a record into training samples, and counts what is lost because samples are too long.

A record is `{"text": …}`, `{"prompt": …, "response": …}`, `{"messages": [{"role": …, "content": …}, …]}`,
the same with ShareGPT's names (`conversations`, `from`, `value`) or AMD's (`conversation`, `human`,
`assistant`), or `{"user": …, "assistant": …}`, a single exchange; or a line of `paradraft.decode.round_log`. The
labels are: of text every token; of a prompt and its response the response and the end-of-text after it; of a
conversation all turns of the assistant, as the model's chat template renders them, and their end tokens. A record with
`"finish_reason": "length"` was cut: there is no label after its response or its last turn.

A sample with more than `max_length` tokens is truncated or split. The pieces of an answer begin in the middle of it,
without the prompt that the target read there, so by default only plain text is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.data.chat import conversation_samples
from paradraft.data.samples import BEGAN, REFUSED, Sample, group_of, is_longer, pieces, truncated
from paradraft.decode.round_log import COMPARED
from paradraft.sources.records import LOG_KEYS, Record, conversation_of, renamed
from paradraft.text.chat_template import ChatTemplate
from paradraft.text.tokenization import encode_continuation, encode_prompt, exact_text

Long = Literal["auto", "truncate", "split"]
SHOWN = 40
"""Characters of a text in an error message."""


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Settings by which records become samples.

    Args:
        long: treatment of longer ones: "truncate" keeps the beginning, "split" cuts into pieces that overlap by one
            token, "auto" splits plain text and truncates records with a prompt or turns.
        columns: the source's names for the columns of `paradraft.sources.records`.
    """

    template: ChatTemplate
    max_length: int
    long: Long = "auto"
    columns: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A tokenized record.

    Args:
        place: file and line of the record, for error messages.
        samples: of at most `max_length` tokens, each with a label.
        is_unlabelled: whether it has no label, whatever the maximum length.
        wholes: count of samples before cutting.
        truncated: samples that were truncated and have labels left.
        lost: labels that were truncated away.
        empty: samples that were truncated and have no label left.
        headless: pieces of a record with a prompt or turns that lack its beginning.
    """

    place: str
    samples: list[Sample]
    is_talk: bool
    is_unlabelled: bool
    wholes: int
    labels: int
    truncated: int
    lost: int
    empty: int
    headless: int


def tokenized(place: str, row: Record, how: Tokenization) -> Tokenized:
    """Tokenizes a record.

    Raises:
        ValueError: the record is broken.
    """
    try:
        record = renamed(row, how.columns)
        wholes = _from_record(record, how.template)
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        raise ValueError(f"{place}: {error}") from None
    group = group_of(wholes[0]) if wholes else 0
    is_plain = isinstance(record.get("text"), str)
    splits = is_plain if how.long == "auto" else how.long == "split"
    parts: list[Sample] = []
    shortened, lost, empty, headless = 0, 0, 0, 0
    for whole in wholes:
        cut = list((pieces if splits else truncated)(whole, how.max_length, group=group))
        parts += cut
        if not is_longer(whole, how.max_length):
            continue
        if splits:
            begins = bool(cut) and cut[0].tokens == whole.tokens[: how.max_length]
            headless += 0 if is_plain else len(cut) - begins
        else:
            lost += sum(whole.is_label) - sum(sum(part.is_label) for part in cut)
            shortened += bool(cut)
            empty += not cut
    return Tokenized(
        place=place,
        samples=parts,
        is_talk=not _is_text(record),
        is_unlabelled=not parts and not any(any(whole.is_label[1:]) for whole in wholes),
        wholes=len(wholes),
        labels=sum(sum(whole.is_label) for whole in wholes),
        truncated=shortened,
        lost=lost,
        empty=empty,
        headless=headless,
    )


def _is_text(record: Mapping[str, Any]) -> bool:
    """Whether a valid record is no conversation; in a table, missing values are null."""
    texts = (("text",), ("prompt", "response"))
    return record.keys() >= LOG_KEYS or any(all(isinstance(record.get(key), str) for key in keys) for keys in texts)


def _from_record(record: Any, template: ChatTemplate) -> list[Sample]:
    tokenizer, is_cut = template.tokenizer, record.get("finish_reason") == "length"
    match record:
        case {"text": str(text)}:
            return [_from_text(text, tokenizer)]
        case {"prompt": str(prompt), "response": str(response)}:
            return [_from_response(prompt, response, tokenizer, is_cut=is_cut)]
        case {"tokens": list(tokens), "prompt_tokens": int(start), "begins": str(begins), "rounds": list(roots),
              "depths": list(depths), "accepted": list(accepted)}:  # fmt: skip
            sample = _from_rounds(tokens, start, list(zip_longest(roots, depths, accepted, fillvalue=-1)))
            _check_tokenizer(tokens, begins, tokenizer)
            return [sample]
    if (messages := conversation_of(record)) is not None:
        return conversation_samples(messages, template, is_cut=is_cut)
    raise ValueError('expected {"text": …}, {"prompt": …, "response": …}, {"messages": […]} or a line of --rounds')


def _from_text(text: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    tokens = _ended(encode_prompt(text, tokenizer), tokenizer)
    return Sample(tokens=tokens, is_label=[True] * len(tokens))


def _from_response(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, *, is_cut: bool) -> Sample:
    question, written = encode_prompt(prompt, tokenizer), encode_continuation(response, tokenizer)
    answer = written if is_cut else _ended(written, tokenizer)
    return Sample(tokens=question + answer, is_label=[False] * len(question) + [True] * len(answer))


def _from_rounds(tokens: list[int], start: int, rounds: list[tuple[int, int, int]]) -> Sample:
    """A line of a log of rounds, see `paradraft.decode.round_log`."""
    numbers = [*tokens, start, *chain.from_iterable(rounds)]
    if not all(isinstance(number, int) and 0 <= number < 2**31 for number in numbers):
        raise ValueError("a log of rounds has whole numbers from 0 on, and as many depths and accepted as rounds")
    flags = [0] * len(tokens)
    for root, depth, accepted in rounds:
        if not start - 1 <= root < len(tokens):
            raise ValueError(f"a round begins at token {root}: it is no token before an answer's")
        if accepted > depth:
            raise ValueError(f"the round at token {root} accepts {accepted} tokens of {depth}")
        flags[root] = REFUSED if accepted < depth else BEGAN
    return Sample(tokens=tokens, is_label=[index >= start for index in range(len(tokens))], rounds=flags)


def _check_tokenizer(tokens: list[int], begins: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compares what ids mean here and where the line was written."""
    if (here := exact_text(tokens[:COMPARED], tokenizer)) != begins:
        raise ValueError(
            f"the ids of the log are of another tokenizer, here they begin with {here[:SHOWN]!r} and not with "
            f"{begins[:SHOWN]!r}: name a log of this target's answers"
        )


def _ended(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Appends an end-of-text unless there is one."""
    end = [tokenizer.eos_token_id]
    return tokens if tokens[-1:] == end else tokens + end

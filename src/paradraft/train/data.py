"""Training samples from text and conversations.

A record is `{"text": …}`, `{"prompt": …, "response": …}`, `{"messages": [{"role": …, "content": …}, …]}`,
the same with ShareGPT's names (`conversations`, `from`, `value`), or `{"user": …, "assistant": …}`, one
turn of a conversation. Of text every token is a label; of a prompt and its response only the response
is, and the end-of-text behind it; of a conversation the assistant's turns, all of them, as the model's
chat template marks them, and their ends. A record that says `"finish_reason": "length"` was cut: nothing
is learnt behind its response or its last turn.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.models.texts import continuation, opening
from paradraft.sources import records
from paradraft.train.chat_template import ChatTemplate, check_variables
from paradraft.train.conversations import conversation_samples
from paradraft.train.record import conversation_of, renamed
from paradraft.train.sample import Sample, group_of, pieces

NAMED = 5
"""How many samples a complaint names."""


def load_samples(
    sources: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    columns: Mapping[str, str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    end_ids: Collection[int] = (),
    skip_unlabelled: bool = False,
) -> list[Sample]:
    """Reads all sources; long samples are split into pieces of at most `max_length` tokens.

    Args:
        sources: files, or Hugging Face datasets.
        tokenizer: the model's, with its chat template.
        max_length: most tokens of a sample.
        columns: what the sources call the names in `paradraft.train.record`, if otherwise.
        chat_template_kwargs: variables of the chat template.
        end_ids: tokens that end a turn, besides the tokenizer's end-of-text.
        skip_unlabelled: leave samples out in which nothing is a label.

    Raises:
        ValueError: a source does not exist or cannot be read, a record is broken (named by number), samples
            have nothing to learn, or the chat template does not know a variable.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-text token, so the end of a text cannot be learned")
    ends = frozenset([tokenizer.eos_token_id, *end_ids])
    template = ChatTemplate(tokenizer=tokenizer, variables=chat_template_kwargs or {}, end_ids=ends)
    check_variables(template.variables, tokenizer)
    samples: list[Sample] = []
    unlabelled: list[str] = []
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
            parts = [piece for sample in found for piece in pieces(sample, max_length, group=group)]
            samples += parts
            if not parts:
                unlabelled.append(place)
    if unlabelled and not skip_unlabelled:
        some = ", ".join(unlabelled[:NAMED]) + (", …" if len(unlabelled) > NAMED else "")
        raise ValueError(
            f"nothing is a label in {len(unlabelled)} samples ({some}): remove them, or set skip_unlabelled=true"
        )
    if not samples:
        raise ValueError(f"nothing to learn in {', '.join(map(str, sources))}: no sample has a token to predict")
    if template.variables and not has_talks:
        warnings.warn("chat_template_kwargs is ignored without conversations in the data", stacklevel=2)
    return samples


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
    tokens = _ended(opening(text, tokenizer), tokenizer)
    return Sample(tokens=tokens, is_label=[True] * len(tokens))


def _from_response(prompt: str, response: str, tokenizer: PreTrainedTokenizerBase, *, is_cut: bool) -> Sample:
    question, written = opening(prompt, tokenizer), continuation(response, tokenizer)
    answer = written if is_cut else _ended(written, tokenizer)
    return Sample(tokens=question + answer, is_label=[False] * len(question) + [True] * len(answer))


def _ended(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """With one end-of-text behind, which may stand in the text already."""
    end = [tokenizer.eos_token_id]
    return tokens if tokens[-1:] == end else tokens + end

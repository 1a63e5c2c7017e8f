"""Training samples from conversations; the assistant's turns are the labels.

The chat template gives the prompt of a turn, up to the generation prompt, and the tokens of the turn. Some templates
render a turn differently once others follow: Qwen3's drops earlier reasoning. So each turn is rendered as the last
one. It extends the previous sample if its prompt begins with that sample, and starts a new sample otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import date

from paradraft.data.samples import Sample
from paradraft.text.chat_template import CLOCK, ChatTemplate, Message, names, text_message
from paradraft.text.tokenization import encode_continuation

DATE = "date_string"
"""Template variable with the date; templates that know it call the clock only if it is not set."""
CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(['"])(.*?)\1\s*\)""")
"""A template's call of the clock, with its strftime format as group 2."""


def dated(template: ChatTemplate, date_string: str | None, day: date | None) -> ChatTemplate:
    """Returns a chat template that writes a fixed date; `template` itself if it writes none.

    Llama 3.2's template writes today's date, so the same data would give other tokens tomorrow.

    Args:
        date_string: written as the date, whatever format the template wants.
        day: today's date if there is no `date_string`; None for the actual day.
    """
    if not template.tokenizer.chat_template:
        return template
    source = template.tokenizer.get_chat_template()
    variables = dict(template.variables)
    if date_string is not None and names(source, DATE):
        variables[DATE] = date_string

    def written_date(call: re.Match[str]) -> str:
        if date_string is not None:
            return json.dumps(date_string, ensure_ascii=False)
        return call[0] if day is None else json.dumps(day.strftime(call[2]), ensure_ascii=False)

    # `transformers` passes no functions to a template, so the calls of its clock are replaced by their results.
    rendered = CLOCK_CALL.sub(written_date, source)
    if rendered == source and variables == template.variables:
        return template
    return replace(template, written=rendered, variables=variables)


Turn = tuple[list[int], list[int]]
"""The tokens of the prompt and of the answer."""


def conversation_samples(messages: list[Message], template: ChatTemplate, *, is_cut: bool) -> list[Sample]:
    """Makes the samples of a conversation; none if the assistant says nothing.

    Args:
        messages: at least one, each with a role and a content: a text, or a list of parts of type text.
        template: of the model. If it marks the assistant's tokens, the labels are these and an end token after them.
        is_cut: whether the last turn, if it is the assistant's, was cut by a length limit.

    Raises:
        ValueError: there is no chat template; or a message (named by its index, from 1) has no role, is not all
            text, or is not rendered by the template as the target would write it.
    """
    if not template.tokenizer.chat_template:
        raise ValueError("the model has no chat template, so conversations cannot be read")
    messages = [text_message(message, index) for index, message in enumerate(messages, start=1)]
    is_cut = is_cut and messages[-1]["role"] == "assistant"
    if template.has_marks:
        return [_marked(messages, template, is_cut=is_cut)]
    return _joined(_turns(messages, template, is_cut=is_cut))


def _turns(messages: list[Message], template: ChatTemplate, *, is_cut: bool) -> Iterator[Turn]:
    for length, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        if length == 1:  # it was not asked for
            yield template.tokens(messages[:1], ask=False), []
            continue
        prompt = template.tokens(messages[: length - 1], ask=True)
        if is_cut and length == len(messages):
            yield prompt, _unrendered(message, template)
        else:
            yield prompt, _answer(messages[:length], prompt, template)


def _joined(turns: Iterable[Turn]) -> list[Sample]:
    """Joins turns into as few samples as possible.

    >>> [list(sample.tokens) for sample in _joined([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 4], [6])])]
    [[1, 2, 3, 4, 5], [1, 4, 6]]
    """
    samples: list[Sample] = []
    for prompt, answer in turns:
        is_label = [False] * len(prompt)
        if samples and prompt[: len(samples[-1].tokens)] == list(samples[-1].tokens):
            before = samples.pop().is_label
            is_label[: len(before)] = before
        samples.append(Sample(tokens=prompt + answer, is_label=is_label + [True] * len(answer)))
    return samples


def _answer(messages: list[Message], prompt: list[int], template: ChatTemplate) -> list[int]:
    """Tokens that the template puts after the prompt of the last message."""
    subject, fix = f"message {len(messages)}: the chat template", "give prompt and response instead of messages"
    whole, prompt_text = template.tokens(messages, ask=False), template.text(messages[:-1], ask=True)
    whole_text = template.text(messages, ask=False)
    is_prefix = whole[: len(prompt)] == prompt
    if not is_prefix and not whole_text.startswith(prompt_text):
        raise ValueError(f"{subject} does not write it after the prompt of its turn: {fix}")
    text = whole_text.removeprefix(prompt_text)
    if _without_spaces(messages[-1]["content"]) not in _without_spaces(text):
        raise ValueError(f"{subject} leaves out a part of it, such as what the model thought: {fix}")
    if not is_prefix:
        # A token of the whole text spans the end of the prompt and the first characters of the answer, such as spaces.
        # The target has read the tokens of the prompt alone, and continues after these.
        return encode_continuation(text, template.tokenizer)
    return whole[len(prompt) :]


def _unrendered(message: Message, template: ChatTemplate) -> list[int]:
    # The template would add an end of turn, which a cut answer does not have.
    return encode_continuation(message["content"], template.tokenizer)


def _marked(messages: list[Message], template: ChatTemplate, *, is_cut: bool) -> Sample:
    """Labels the tokens that the template marks, the ends of their turns, and the turn that was cut."""
    tokens: list[int] = []
    is_label: list[bool] = []
    if rendered := messages[:-1] if is_cut else messages:
        tokens, marks = template.marked(rendered, ask=is_cut)
        is_label = _with_ends(tokens, marks, template.end_ids)
    answer = _unrendered(messages[-1], template) if is_cut else []
    return Sample(tokens=tokens + answer, is_label=is_label + [True] * len(answer))


def _with_ends(tokens: list[int], marks: list[bool], end_ids: Collection[int]) -> list[bool]:
    """Adds the end tokens right after marked ones: some templates do not mark them, though the target writes them.

    >>> _with_ends([5, 0, 6, 0, 7], [False, False, True, False, False], end_ids={0})
    [False, False, True, True, False]
    """
    ends = [token in end_ids for token in tokens]
    return [is_marked or (i > 0 and ends[i] and marks[i - 1] and not ends[i - 1]) for i, is_marked in enumerate(marks)]


def _without_spaces(text: str) -> str:
    return "".join(text.split())

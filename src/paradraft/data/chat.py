"""The training samples that conversations become: what the assistant says is learnt.

The chat template says what the target reads before a turn, up to the generation prompt, and what it writes after
that. Some templates write a turn otherwise once others follow: Qwen3's leaves out what the model thought before. So a
turn is taken as it is while no other follows. It continues the sample before it if the target reads that very sample
there, and begins a sample of its own if not.
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
"""What templates call the date that they write instead of asking the clock, if it is given."""
CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(['"])(.*?)\1\s*\)""")
"""How they ask it: in a form that stands in the template."""


def dated(template: ChatTemplate, date_string: str | None, day: date | None) -> ChatTemplate:
    """A chat template that writes the same date every day; the very same one if it writes none.

    Llama 3.2's template writes today's date, so the same data would be other tokens tomorrow.

    Args:
        template: as the model has it.
        date_string: what stands for the date, in whatever form the template asks for it.
        day: what is today where no `date_string` is given; None for the day that it is.
    """
    if not template.tokenizer.chat_template:
        return template
    written = template.tokenizer.get_chat_template()
    variables = dict(template.variables)
    if date_string is not None and names(written, DATE):
        variables[DATE] = date_string

    def written_date(call: re.Match[str]) -> str:
        if date_string is not None:
            return json.dumps(date_string, ensure_ascii=False)
        return call[0] if day is None else json.dumps(day.strftime(call[2]), ensure_ascii=False)

    # `transformers` hands no functions over to a template, so the calls of its clock are replaced by what they return.
    fixed = CLOCK_CALL.sub(written_date, written)
    if fixed == written and variables == template.variables:
        return template
    return replace(template, written=fixed, variables=variables)


Turn = tuple[list[int], list[int]]
"""The tokens that the target reads, and those that it writes after them."""


def conversation_samples(messages: list[Message], template: ChatTemplate, *, is_cut: bool) -> list[Sample]:
    """The samples of a conversation; none where the assistant says nothing.

    Args:
        messages: at least one, each with a role and a content: a text, or a list of parts of type text.
        template: the model's. If it marks the assistant's tokens, its marks are the labels, and an end after them.
        is_cut: whether the last turn was cut, if it is the assistant's.

    Raises:
        ValueError: there is no chat template; or a message (named by number) has no role, is not all text, or is
            not written by the template as the target would write it.
    """
    if not template.tokenizer.chat_template:
        raise ValueError("the model has no chat template, so conversations cannot be read")
    messages = [text_message(message, number) for number, message in enumerate(messages, start=1)]
    is_cut = is_cut and messages[-1]["role"] == "assistant"
    if template.has_marks:
        return [_marked(messages, template, is_cut=is_cut)]
    return _joined(_turns(messages, template, is_cut=is_cut))


def _turns(messages: list[Message], template: ChatTemplate, *, is_cut: bool) -> Iterator[Turn]:
    for number, message in enumerate(messages, start=1):
        if message["role"] != "assistant":
            continue
        if number == 1:  # it was not asked for
            yield template.tokens(messages[:1], ask=False), []
            continue
        prompt = template.tokens(messages[: number - 1], ask=True)
        if is_cut and number == len(messages):
            yield prompt, _as_it_came(message, template)
        else:
            yield prompt, _answer(messages[:number], prompt, template)


def _joined(turns: Iterable[Turn]) -> list[Sample]:
    """As few samples as there may be.

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
    """What the template puts after the prompt of the last message."""
    who, instead = f"message {len(messages)}: the chat template", "give prompt and response instead of messages"
    whole, asked = template.tokens(messages, ask=False), template.text(messages[:-1], ask=True)
    written = template.text(messages, ask=False)
    is_prefix = whole[: len(prompt)] == prompt
    if not is_prefix and not written.startswith(asked):
        raise ValueError(f"{who} does not write it after the prompt of its turn: {instead}")
    text = written.removeprefix(asked)
    if _without_spaces(messages[-1]["content"]) not in _without_spaces(text):
        raise ValueError(f"{who} leaves out a part of it, such as what the model thought: {instead}")
    if not is_prefix:
        # A token of the whole text spans the end of the prompt and the answer's first characters, such as its spaces.
        # Whoever is asked has read the prompt's own tokens, and goes on after them.
        return encode_continuation(text, template.tokenizer)
    return whole[len(prompt) :]


def _as_it_came(message: Message, template: ChatTemplate) -> list[int]:
    # The template would put an end of turn after what was cut.
    return encode_continuation(message["content"], template.tokenizer)


def _marked(messages: list[Message], template: ChatTemplate, *, is_cut: bool) -> Sample:
    """Labels what the template marks, the ends of its turns, and the turn that was cut."""
    tokens: list[int] = []
    is_label: list[bool] = []
    if rendered := messages[:-1] if is_cut else messages:
        tokens, marks = template.marked(rendered, ask=is_cut)
        is_label = _with_ends(tokens, marks, template.end_ids)
    answer = _as_it_came(messages[-1], template) if is_cut else []
    return Sample(tokens=tokens + answer, is_label=is_label + [True] * len(answer))


def _with_ends(tokens: list[int], marks: list[bool], end_ids: Collection[int]) -> list[bool]:
    """The marks, and the ends right after them, which some templates leave out though the target writes them.

    >>> _with_ends([5, 0, 6, 0, 7], [False, False, True, False, False], end_ids={0})
    [False, False, True, True, False]
    """
    ends = [token in end_ids for token in tokens]
    return [
        is_marked or (place > 0 and ends[place] and marks[place - 1] and not ends[place - 1])
        for place, is_marked in enumerate(marks)
    ]


def _without_spaces(text: str) -> str:
    return "".join(text.split())

"""A model's chat template, and the variables that are set in it.

Some templates have switches, such as Qwen3's `enable_thinking`. `transformers` hands them over as further
arguments, servers take them as `chat_template_kwargs`, and so they are called here.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from paradraft.train.record import Message

CLOCK, DATE = "strftime_now", "date_string"
"""What templates call `transformers`' clock, and the date that they write instead of asking it, if that is given."""
CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(['"])(.*?)\1\s*\)""")
"""How they ask it: in a form that stands in the template."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Writes conversations as a model reads them.

    Args:
        tokenizer: the model's; it has a chat template if anything is written.
        variables: what is set in the template; see `check_variables`.
        end_ids: tokens with which the model ends a turn.
        written: what is written instead of the tokenizer's own template; None writes that.
    """

    tokenizer: PreTrainedTokenizerBase
    variables: Mapping[str, Any] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()
    written: str | None = None

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's tokens."""
        return re.search(r"\{%[-+]?\s*generation", self.tokenizer.get_chat_template()) is not None

    def text(self, messages: list[Message], *, ask: bool) -> str:
        """The text of a conversation, with a generation prompt at the end if the next turn is asked for."""
        write = partial(self.tokenizer.apply_chat_template, chat_template=self.written)
        return str(write(messages, tokenize=False, add_generation_prompt=ask, **self.variables))

    def tokens(self, messages: list[Message], *, ask: bool) -> list[int]:
        """The same as tokens."""
        write = partial(self.tokenizer.apply_chat_template, chat_template=self.written)
        return list(write(messages, return_dict=True, add_generation_prompt=ask, **self.variables)["input_ids"])

    def marked(self, messages: list[Message], *, ask: bool) -> tuple[list[int], list[bool]]:
        """The same, and for each token whether the template marks it as the assistant's."""
        write = partial(self.tokenizer.apply_chat_template, chat_template=self.written)
        found = write(
            messages, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=ask, **self.variables
        )
        return list(found["input_ids"]), list(map(bool, found["assistant_masks"]))


def check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for the first variable that the chat template does not have, or that is not for users to set.

    A template ignores what it does not know, so that a misspelt switch would stay as it is.
    """
    template = tokenizer.get_chat_template() if variables and tokenizer.chat_template else ""
    for name in variables:
        if name in ("messages", CLOCK) or name in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ValueError(f"chat_template_kwargs: {name!r} is not for you to set: leave it out")
        if not _names(template, name):
            raise ValueError(f"chat_template_kwargs: the model's chat template has no variable {name!r}")


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
    if date_string is not None and _names(written, DATE):
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


def _names(template: str, variable: str) -> bool:
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None

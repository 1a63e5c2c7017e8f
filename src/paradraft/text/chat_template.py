"""Chat templates: write a conversation as the prompt of a model.

Some templates have switches, such as Qwen3's `enable_thinking`. `transformers` takes them as further arguments,
servers as `chat_template_kwargs`, which is their name here.
"""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paradraft.text.template_limits import check_length, limited

Message = dict[str, Any]
CLOCK = "strftime_now"
"""The name of `transformers`' clock in templates."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Renders conversations as a model reads them.

    Args:
        tokenizer: the model's; it must have a chat template before anything is rendered.
        variables: of the template, see `check_variables`.
        end_ids: tokens with which the model ends a turn.
        written: a template in place of the tokenizer's.
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
        """Renders a conversation as text; with `ask`, the generation prompt of the next turn is at its end."""
        return check_length(str(self._write(messages, tokenize=False, add_generation_prompt=ask)))

    def tokens(self, messages: list[Message], *, ask: bool) -> list[int]:
        """Renders a conversation as token ids."""
        return list(self._write(messages, return_dict=True, add_generation_prompt=ask)["input_ids"])

    def marked(self, messages: list[Message], *, ask: bool) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether the template marks it as the assistant's."""
        encoding = self._write(messages, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=ask)
        return list(encoding["input_ids"]), list(map(bool, encoding["assistant_masks"]))

    def _write(self, messages: list[Message], **how: bool) -> Any:
        with limited():
            return self.tokenizer.apply_chat_template(messages, chat_template=self.written, **how, **self.variables)


def check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for the first variable that the chat template does not have, or that users may not set.

    Because a template ignores unknown variables, a misspelt switch would have no effect.
    """
    template = tokenizer.get_chat_template() if variables and tokenizer.chat_template else ""
    for name in variables:
        if name in ("messages", CLOCK) or name in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ValueError(f"chat_template_kwargs: {name!r} is not for you to set: leave it out")
        if not names(template, name):
            raise ValueError(f"chat_template_kwargs: the model's chat template has no variable {name!r}")


def names(template: str, variable: str) -> bool:
    """Whether a template mentions a variable, as a whole word.

    >>> names("{% if enable_thinking %}a{% endif %}", "thinking")
    False
    """
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None


def text_message(message: Mapping[str, Any], number: int) -> Message:
    """A message, as in OpenAI's API, with its content as one text: parts of type text are joined by line breaks.

    Raises ValueError, with the message's number from 1, if it has no role or a content that is not text.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role")
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts or not all(map(_is_text, parts)):
        raise ValueError(
            f"message {number} has the content {reprlib.repr(content)}: give a text, or parts of type text; images and "
            "tool calls are not read"
        )
    text = "\n".join(part["text"] for part in parts)  # as servers join them for a template that takes a text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"message {number} is not UTF-8 text: look at its character {error.start + 1}") from None
    return {**message, "content": text}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def check_questions(messages: object) -> list[Message]:
    """The messages of a conversation that the model is to continue.

    Raises:
        ValueError: no messages, a message (named by number) that is not text, or a last message of the assistant.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError('messages: use a list such as [{"role": "user", "content": "Hello"}]')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise ValueError(f'message {number} is {reprlib.repr(message)}: use {{"role": "user", "content": "Hello"}}')
    checked = [text_message(message, number) for number, message in enumerate(messages, start=1)]
    if checked[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's: end with what it is asked")
    return checked


def template_of(
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> ChatTemplate:
    """The chat template of a model's tokenizer; raises ValueError if there is none, or it lacks a variable."""
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template, so it cannot be asked conversations: ask a text")
    if not isinstance(tokenizer.chat_template, str | dict):
        raise ValueError(f"the model's chat template is {reprlib.repr(tokenizer.chat_template)}, and no text")
    check_variables(variables or {}, tokenizer)
    with_tools = {"tools": list(tools)} if tools else {}
    return ChatTemplate(tokenizer=tokenizer, variables={**(variables or {}), **with_tools})


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that a chat template writes after an assistant's message; None where it cannot be determined."""
    answer = "Yes."
    if not isinstance(tokenizer.chat_template, str | dict):
        return None
    try:
        text = ChatTemplate(tokenizer=tokenizer).text(
            [{"role": "user", "content": "Are you well?"}, {"role": "assistant", "content": answer}], ask=False
        )
    except Exception:  # a template is a program, and this one does not write such a conversation
        return None
    _, separator, rest = text.rpartition(answer)
    tokens = tokenizer(rest.strip(), add_special_tokens=False)["input_ids"] if separator else []
    return tokens[0] if tokens else None


def ask_text(messages: object, template: ChatTemplate) -> str:
    """The prompt of a conversation as text, up to where the answer begins.

    Raises:
        ValueError: see `check_questions`; or the template refuses the conversation.
    """
    checked = check_questions(messages)
    try:
        text = template.text(checked, ask=True)
        text.encode()
        return text
    except UnicodeEncodeError:
        raise ValueError("the conversation is not UTF-8 text: look at its calls and tools") from None
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses this conversation: {error}") from None
    except Exception as error:  # a template is a program, and may be wrong in any way
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"the model's chat template fails at this conversation ({problem})") from None


def ask_tokens(messages: object, template: ChatTemplate) -> list[int]:
    """The prompt of a conversation as token ids, with no special tokens added; raises as `ask_text`."""
    return list(template.tokenizer(ask_text(messages, template), add_special_tokens=False)["input_ids"])

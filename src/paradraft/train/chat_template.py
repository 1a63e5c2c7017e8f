"""A model's chat template, and the variables that are set in it.

Some templates have switches, such as Qwen3's `enable_thinking`. `transformers` hands them over as further
arguments, servers take them as `chat_template_kwargs`, and so they are called here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from paradraft.train.record import Message


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Writes conversations as a model reads them.

    Args:
        tokenizer: the model's; it has a chat template if anything is written.
        variables: what is set in the template; see `check_variables`.
        end_ids: tokens with which the model ends a turn.
    """

    tokenizer: PreTrainedTokenizerBase
    variables: Mapping[str, Any] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's tokens."""
        return re.search(r"\{%[-+]?\s*generation", self.tokenizer.get_chat_template()) is not None

    def text(self, messages: list[Message], *, ask: bool) -> str:
        """The text of a conversation, with a generation prompt at the end if the next turn is asked for."""
        write = self.tokenizer.apply_chat_template
        return str(write(messages, tokenize=False, add_generation_prompt=ask, **self.variables))

    def tokens(self, messages: list[Message], *, ask: bool) -> list[int]:
        """The same as tokens."""
        write = self.tokenizer.apply_chat_template
        return list(write(messages, return_dict=True, add_generation_prompt=ask, **self.variables)["input_ids"])

    def marked(self, messages: list[Message], *, ask: bool) -> tuple[list[int], list[bool]]:
        """The same, and for each token whether the template marks it as the assistant's."""
        write = self.tokenizer.apply_chat_template
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
        if name == "messages" or name in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ValueError(f"chat_template_kwargs: {name!r} is not for you to set: leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"chat_template_kwargs: the model's chat template has no variable {name!r}")

"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paradraft.engine.engine import Engine
from paradraft.serve.schemas import AskedChat
from paradraft.serve.shown_tokens import ShownToken


class Chat:
    """Requests for messages, see `forms.Form`."""

    schema = AskedChat
    prompts_name = "messages"
    id_prefix = "chatcmpl-"
    whole_name, piece_name = "chat.completion", "chat.completion.chunk"
    has_one_prompt = True

    def prompts(self, asked: AskedChat) -> list[object]:
        """The one conversation."""
        return [[message.model_dump(exclude_none=True) for message in asked.messages]]

    def tokens(self, prompt: Any, asked: AskedChat, engine: Engine) -> list[int]:
        """The conversation as the model's chat template writes it."""
        return engine.chat_tokens(prompt, asked.chat_template_kwargs)

    def whole(self, text: str) -> dict[str, Any]:
        """A message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: Sequence[ShownToken], begin: int) -> dict[str, Any]:
        """An object for each token."""
        written = [
            {**_written(token), "top_logprobs": [_written(each) for each in token.likeliest]} for token in tokens
        ]
        return {"content": written, "refusal": None}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """A piece of a message; the first one says whose it is."""
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


def _written(token: ShownToken) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.logprob, "bytes": token.bytes}

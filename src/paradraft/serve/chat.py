"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paradraft.engine.engine import Engine
from paradraft.serve.schemas import AskedChat
from paradraft.serve.shown_tokens import ShownToken


class ChatCompletions:
    """Chat completion requests, see `forms.Form`."""

    schema = AskedChat
    prompts_name = "messages"
    id_prefix = "chatcmpl-"
    whole_name, piece_name = "chat.completion", "chat.completion.chunk"
    has_one_prompt = True

    def prompts(self, request: AskedChat) -> list[object]:
        """See `Form`; one conversation."""
        return [[message.model_dump(exclude_none=True) for message in request.messages]]

    def tokens(self, prompt: Any, request: AskedChat, engine: Engine) -> list[int]:
        """See `Form`; through the chat template."""
        return engine.chat_tokens(prompt, request.chat_template_kwargs)

    def whole(self, text: str) -> dict[str, Any]:
        """See `Form`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: Sequence[ShownToken], begin: int) -> dict[str, Any]:
        """See `Form`."""
        content = [
            {**_as_json(token), "top_logprobs": [_as_json(each) for each in token.likeliest]} for token in tokens
        ]
        return {"content": content, "refusal": None}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """See `Form`; the first delta has the role."""
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


def _as_json(token: ShownToken) -> dict[str, Any]:
    return {"token": token.name, "logprob": token.logprob, "bytes": token.bytes}

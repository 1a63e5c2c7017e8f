"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from paradraft.decode.logprobs import TokenLogprobs
from paradraft.engine.engine import Engine
from paradraft.engine.request import MOST_LOGPROBS
from paradraft.serve.exchange import ApiError
from paradraft.serve.schemas import LEAST, NULL, NULLS, NUMBER, STRICT, STRING, ApiRequest, list_of, object_of, or_null
from paradraft.text.chat_template import names
from paradraft.text.tokenization import REPLACEMENT

TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": STRING},
    "required": ["type", "text"],
}
TOKEN = {
    "token": STRING,
    "logprob": NUMBER,
    "bytes": or_null(list_of({"type": "integer", "minimum": 0, "maximum": 255})),
}
ASSISTANT = {"const": "assistant"}


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(**STRICT, json_schema_extra=NULLS)
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, Any]], WithJsonSchema({"anyOf": [STRING, list_of(TEXT_PART, minItems=1)]})]
    name: str | None = None


class ChatCompletionRequest(ApiRequest):
    """Write the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    prompts_name: ClassVar = "messages"
    id_prefix: ClassVar = "chatcmpl-"
    whole_name: ClassVar = "chat.completion"
    piece_name: ClassVar = "chat.completion.chunk"
    has_one_prompt: ClassVar = True
    whole_schema: ClassVar = {"message": object_of(role=ASSISTANT, content=STRING, refusal=NULL)}
    piece_schema: ClassVar = {"delta": object_of({"role": ASSISTANT}, content=STRING)}
    logprobs_schema: ClassVar = object_of(
        content=list_of(object_of(**TOKEN, top_logprobs=list_of(object_of(**TOKEN)))), refusal=NULL
    )

    @property
    def most_logprobs(self) -> int | None:
        """See `ApiRequest`."""
        return self.top_logprobs if self.logprobs else None

    @property
    def limit_name(self) -> str:
        """See `ApiRequest`; the new parameter or the deprecated one."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self) -> None:
        """See `ApiRequest`."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is for logprobs: set logprobs too", param="top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            message = "max_tokens is the old name of max_completion_tokens: give one of them"
            raise ApiError(400, message, param="max_tokens")

    def prompts(self) -> list[Any]:
        """See `ApiRequest`; one conversation."""
        return [[message.model_dump(exclude_none=True) for message in self.messages]]

    def tokens(self, prompt: Any, engine: Engine) -> list[int]:
        """See `ApiRequest`; through the chat template, in which developers are the system unless it names them."""
        template = str(engine.target.tokenizer.chat_template)
        if not names(template, "developer"):
            prompt = [{**each, "role": "system"} if each["role"] == "developer" else each for each in prompt]
        return engine.chat_tokens(prompt, self.chat_template_kwargs)

    def whole(self, text: str) -> dict[str, Any]:
        """See `ApiRequest`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """See `ApiRequest`; the first delta has the role."""
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}

    def logprobs_json(
        self, tokens: Sequence[TokenLogprobs], shown: Callable[[int], tuple[str, str]], begin: int
    ) -> dict[str, Any]:
        """See `ApiRequest`."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            name, text = shown(token)
            # Of a part of a character the text does not show the bytes.
            utf8 = None if REPLACEMENT in text else list(text.encode())
            return {"token": name, "logprob": max(logprob, LEAST), "bytes": utf8}

        content = [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*pair) for pair in each.likeliest]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}

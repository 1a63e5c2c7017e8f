"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict
from transformers import PreTrainedTokenizerBase

from paradraft.decode.logprobs import TokenLogprobs
from paradraft.engine.engine import Engine
from paradraft.engine.request import MOST_LOGPROBS
from paradraft.errors import one_line
from paradraft.serve.exchange import ApiError
from paradraft.serve.grammar import CallGrammar
from paradraft.serve.json_schema import COUNT, NULL, NULLS, NUMBER, STRING, list_of, nullable, object_of, or_null
from paradraft.serve.schemas import LEAST, STRICT, ApiRequest
from paradraft.serve.tools import BEGIN, END, NamedTool, Tool, ToolCall, call_grammar
from paradraft.text.chat_template import ask_tokens, names, template_of
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
ASSISTANT: JsonDict = {"const": "assistant"}
CALL_FIELDS = {
    "id": STRING, "type": {"const": "function"}, "function": object_of(name=STRING, arguments=STRING)
}  # fmt: skip
CALL, CALL_PIECE = object_of(**CALL_FIELDS), object_of(index=COUNT, **CALL_FIELDS)


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(
        **STRICT, json_schema_extra={**NULLS, "anyOf": [{"required": ["content"]}, {"properties": {"role": ASSISTANT}}]}
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[dict[str, Any]] | None, WithJsonSchema({"anyOf": [STRING, list_of(TEXT_PART, minItems=1)]})
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, json_schema_extra=nullable)
    tool_call_id: str | None = None
    annotations: list[Any] = Field(default_factory=list, json_schema_extra=nullable)

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments of calls as objects."""
        written = {"content": "", **self.model_dump(exclude_none=True, exclude_unset=True, exclude={"annotations"})}
        for call in written.get("tool_calls", ()):
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError):
                continue  # the template writes the text as it is
        return written


def has_tools(template: str) -> bool:
    """Whether a chat template offers functions, and its model calls them in a way that we read."""
    return names(template, "tools") and BEGIN in template


class ChatCompletionRequest(ApiRequest):
    """Write the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    prompts_name: ClassVar = "messages"
    id_prefix: ClassVar = "chatcmpl-"
    whole_name: ClassVar = "chat.completion"
    piece_name: ClassVar = "chat.completion.chunk"
    has_one_prompt: ClassVar = True
    whole_schema: ClassVar = {
        "message": object_of({"tool_calls": list_of(CALL)}, role=ASSISTANT, content=or_null(STRING), refusal=NULL)
    }
    piece_schema: ClassVar = {
        "delta": object_of({"role": ASSISTANT, "tool_calls": list_of(CALL_PIECE)}, content=STRING)
    }
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
            problem = "max_tokens is the old name of max_completion_tokens: give one of them"
            raise ApiError(400, problem, param="max_tokens")
        for number, message in enumerate(self.messages):
            where = f"messages[{number}]"
            if message.tool_calls and message.role != "assistant":
                raise ApiError(400, f"{where}.tool_calls: only the assistant calls", param=f"{where}.tool_calls")
            if message.content is None and message.role != "assistant":
                raise ApiError(400, f"{where}.content: it is missing", param=f"{where}.content")
        for number, tool in enumerate(self.tools):
            where = f"tools[{number}].function.parameters"
            if (tool.function.parameters or {}).get("type", "object") != "object":
                raise ApiError(400, f"{where}: its type is not object", param=where)
        known = [tool.function.name for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in known:
            problem = f"tool_choice: {one_line(self.tool_choice.function.name)} is none of the tools"
            raise ApiError(400, problem, param="tool_choice")
        if self.tool_choice == "required" and not self.tools:
            raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
        if self.function_names and self.response_format is not None:
            raise ApiError(400, "response_format: beside tools it is not served", param="response_format")

    def prompts(self) -> list[Any]:
        """See `ApiRequest`; one conversation."""
        return [[message.for_template for message in self.messages]]

    def tokens(self, prompt: Any, engine: Engine) -> list[int]:
        """See `ApiRequest`; through the chat template, in which developers are the system unless it names them."""
        template = str(engine.target.tokenizer.chat_template)
        if not names(template, "developer"):
            prompt = [{**each, "role": "system"} if each["role"] == "developer" else each for each in prompt]
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools] if self.function_names else []
        if tools and not has_tools(template):
            raise ApiError(400, f"tools: the model's chat template has none in {BEGIN}", param="tools")
        return ask_tokens(prompt, template_of(engine.target.tokenizer, self.chat_template_kwargs, tools))

    @property
    def function_names(self) -> list[str]:
        """See `ApiRequest`."""
        return [] if self.tool_choice == "none" else [tool.function.name for tool in self.tools]

    @property
    def stops(self) -> str | list[str]:
        """See `ApiRequest`; the end of the first call if there may be only one."""
        if not self.function_names or self.parallel_tool_calls:
            return self.stop
        return [*([self.stop] if isinstance(self.stop, str) else self.stop), END]

    @property
    def is_constrained(self) -> bool:
        """See `ApiRequest`."""
        return super().is_constrained or (bool(self.function_names) and self.tool_choice != "auto")

    def constraint(self, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | CallGrammar | None:
        """See `ApiRequest`; a call if the request demands one."""
        if not self.function_names or self.tool_choice == "auto":
            return super().constraint(tokenizer)
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.tools if wanted in (None, tool.function.name)]
        return call_grammar(functions, tokenizer)

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

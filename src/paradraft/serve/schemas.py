"""Request schemas: OpenAI's parameters as far as they are served, and vLLM's names for further ones.

A parameter that is not served is rejected by name, even if other servers ignore it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paradraft.core import NO_LIMIT
from paradraft.engine.engine import MOST_LOGPROBS
from paradraft.errors import one_line
from paradraft.serve.replies import ApiError

NOT_SERVED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's parameters that are not served, and their neutral values, which are accepted."""
MOST_STOPS = 4
MOST_WHOLE = 2**53
"""Largest range in which float64 represents every integer."""
MOST_PARAM = 60
"""Most characters of a parameter name in an error: clients may send any name."""
TOKEN_ID = "0|[1-9][0-9]{0,9}"
"""Pattern of the keys of `logit_bias`."""
STRICT = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = STRICT
    include_usage: bool = False


class JsonSchema(BaseModel):
    """JSON schema of an answer; it is always enforced, whatever `strict` says."""

    model_config = STRICT
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Format of an answer: text, JSON, or JSON of a schema."""

    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answers(self) -> Mapping[str, Any] | None:
        """JSON schema of the answers; None if they are texts."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ApiRequest(BaseModel):
    """Parameters that completions and chat completions share; None means not set."""

    model_config = STRICT
    model: str | None = None
    n: int = Field(default=1, ge=1)
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] = Field(default_factory=list)
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    speculation: Literal["off"] | int | None = None
    paradraft: bool = False

    @property
    def most_logprobs(self) -> int | None:
        """Top tokens reported per position; None reports no log probabilities."""
        return None

    @property
    def limit(self) -> int | None:
        """Token limit of the request; None if not set."""
        return self.max_tokens

    @property
    def usual_limit(self) -> int:
        """Token limit of a request that sets none: the context."""
        return NO_LIMIT

    @property
    def limit_name(self) -> str:
        """Name of the parameter that sets `limit`."""
        return "max_tokens"


class AskedText(ApiRequest):
    """A request to continue a text."""

    prompt: Any
    logprobs: int | None = None

    @property
    def most_logprobs(self) -> int | None:
        """See `ApiRequest`."""
        return self.logprobs

    @property
    def usual_limit(self) -> int:
        """OpenAI's default."""
        return 16


class Message(BaseModel):
    """A message of a conversation."""

    model_config = STRICT
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]
    name: str | None = None


class AskedChat(ApiRequest):
    """A request for the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    @property
    def most_logprobs(self) -> int | None:
        """See `ApiRequest`."""
        return self.top_logprobs if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """See `ApiRequest`; from the new parameter or the deprecated one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """See `ApiRequest`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


AskedT = TypeVar("AskedT", bound=ApiRequest)


def read(body: bytes, schema: type[AskedT], defaults: Mapping[str, float] | None = None) -> AskedT:
    """Parses and validates a request.

    `defaults` replace the schema's defaults of parameters that a request leaves out.

    Raises:
        ApiError: the body is not JSON, or a parameter is wrong or not served.
    """
    try:
        value = json.loads(body, parse_constant=_refuse, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {one_line(value)}: send a JSON object")
    parameters = without_nulls(value)
    for name, harmless in NOT_SERVED.items():
        if name in parameters and not any(_same(parameters[name], neutral) for neutral in harmless):
            raise ApiError(400, f"{name} is not served: leave it out", param=name, code="unsupported_parameter")
        parameters.pop(name, None)
    if (unknown := next((name for name in parameters if name not in schema.model_fields), None)) is not None:
        name = _param([unknown])
        raise ApiError(400, f"{name}: there is no such parameter", param=name, code="unknown_parameter")
    if isinstance(messages := parameters.get("messages"), list):
        parameters["messages"] = [without_nulls(each) if isinstance(each, dict) else each for each in messages]
    try:
        request = schema.model_validate({**(defaults or {}), **parameters})
    except ValidationError as error:
        raise _complaint(error) from None
    _check(request)
    return request


def _refuse(constant: str) -> None:
    raise ValueError(f"it has no {constant}")


def _number(text: str) -> float:
    """Parses a JSON number with a point or an exponent; whole numbers become integers.

    >>> _number("5.0"), _number("1e3"), _number("0.5")
    (5, 1000, 0.5)
    """
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MOST_WHOLE else value


def without_nulls(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Drops keys that are null, which clients send for parameters that are not set."""
    return {key: value for key, value in parameters.items() if value is not None}


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 0 is not False


def _complaint(error: ValidationError) -> ApiError:
    """Error for the first mistake."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, path = first["type"], list(first["loc"])
    # For a union type, the path would name the alternative that pydantic tried.
    if path and isinstance(path[0], str) and path[0] in ("stop", "speculation"):
        allowed = {
            "stop": f"use a string, or a list of up to {MOST_STOPS}",
            "speculation": 'use "off", or how many tokens to draft per round',
        }
        return ApiError(400, f"{path[0]}: {allowed[path[0]]}", param=path[0])
    param = _param(path)
    problem = {"extra_forbidden": "there is no such key", "missing": "it is missing"}.get(kind, first["msg"])
    return ApiError(400, f"{param}: {problem}", param=param)


def _param(path: list[int | str]) -> str:
    """Path of a value in a request, as a program would write it.

    >>> _param(["messages", 0, "role"])
    'messages[0].role'
    """
    named = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    escaped = repr(named.removeprefix("."))[1:-1]
    return escaped if len(escaped) <= MOST_PARAM else escaped[: MOST_PARAM - 3] + "..."


def _check(request: ApiRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is for streams: set stream too", param="stream_options")
    if isinstance(request.stop, list) and len(request.stop) > MOST_STOPS:
        raise ApiError(400, f"stop: {len(request.stop)} strings, use at most {MOST_STOPS}", param="stop")
    wrong = next((key for key in request.logit_bias if not re.fullmatch(TOKEN_ID, key)), None)
    if wrong is not None:
        raise ApiError(400, f"logit_bias: {one_line(wrong)} is no token id", param="logit_bias")
    if request.response_format is not None:
        _check_format(request.response_format, request)
    if isinstance(request, AskedChat) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs is for logprobs: set logprobs too", param="top_logprobs")
    if isinstance(request, AskedChat) and request.max_completion_tokens is not None and request.max_tokens is not None:
        raise ApiError(400, "max_tokens is the old name of max_completion_tokens: give one of them", param="max_tokens")


def _check_format(expected: ResponseFormat, request: ApiRequest) -> None:
    if (expected.type == "json_schema") != (expected.json_schema is not None):
        fix = "give json_schema too" if expected.json_schema is None else 'json_schema is for the type "json_schema"'
        raise ApiError(400, f"response_format: its type is {expected.type!a}: {fix}", param="response_format")
    if expected.schema_of_answers is not None and -math.inf in request.logit_bias.values():
        problem = "it forbids a token that the answer may need: use at least -10000"
        raise ApiError(400, f"logit_bias: beside response_format {problem}", param="logit_bias")

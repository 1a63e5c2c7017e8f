"""What requests may ask for: OpenAI's parameters, as far as they are served, and vLLM's names for further ones.

What is not served is refused by name, also where another server would take no notice of it.
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
"""Parameters of OpenAI's that are not served, and the values that change nothing, which are taken."""
MOST_STOPS = 4
MOST_WHOLE = 2**53
"""Up to here a float64 knows each whole number."""
MOST_PARAM = 60
"""Characters of the name of a parameter, which may be a client's own invention."""
TOKEN_ID = "0|[1-9][0-9]{0,9}"
"""How the keys of `logit_bias` are written."""
STRICT = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = STRICT
    include_usage: bool = False


class JsonSchema(BaseModel):
    """What an answer must be; that it is nothing else does not depend on `strict`."""

    model_config = STRICT
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What kind of text an answer is."""

    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answers(self) -> Mapping[str, Any] | None:
        """The JSON schema of answers; None if they are texts."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class Asked(BaseModel):
    """What requests for texts and for conversations have in common; None is what is not given."""

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
        """How many of the likeliest tokens are told for each token; None tells no probabilities."""
        return None

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if the request says so."""
        return self.max_tokens

    @property
    def usual_limit(self) -> int:
        """Most tokens of an answer if it does not: as many as there is room for."""
        return NO_LIMIT

    @property
    def limit_name(self) -> str:
        """The parameter that says so."""
        return "max_tokens"


class AskedText(Asked):
    """A request to go on with a text."""

    prompt: Any
    logprobs: int | None = None

    @property
    def most_logprobs(self) -> int | None:
        """See `Asked`."""
        return self.logprobs

    @property
    def usual_limit(self) -> int:
        """OpenAI's."""
        return 16


class Message(BaseModel):
    """A message of a conversation."""

    model_config = STRICT
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]]
    name: str | None = None


class AskedChat(Asked):
    """A request for the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    @property
    def most_logprobs(self) -> int | None:
        """See `Asked`."""
        return self.top_logprobs if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """See `Asked`; by its new name or by its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """The parameter that says so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


AskedT = TypeVar("AskedT", bound=Asked)


def read(body: bytes, schema: type[AskedT], defaults: Mapping[str, float] | None = None) -> AskedT:
    """A request.

    Args:
        body: as it has come.
        schema: of its kind.
        defaults: of parameters that it does not give, in place of those of the schema.

    Raises:
        ApiError: it is not JSON, or asks for something that there is not.
    """
    try:
        found = json.loads(body, parse_constant=_refuse, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {one_line(found)}: send a JSON object")
    given = without_nulls(found)
    for name, harmless in NOT_SERVED.items():
        if name in given and not any(_same(given[name], value) for value in harmless):
            raise ApiError(400, f"{name} is not served: leave it out", param=name, code="unsupported_parameter")
        given.pop(name, None)
    if (unknown := next((name for name in given if name not in schema.model_fields), None)) is not None:
        name = _param([unknown])
        raise ApiError(400, f"{name}: there is no such parameter", param=name, code="unknown_parameter")
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = [without_nulls(each) if isinstance(each, dict) else each for each in messages]
    try:
        asked = schema.model_validate({**(defaults or {}), **given})
    except ValidationError as error:
        raise _complaint(error) from None
    _check(asked)
    return asked


def _refuse(constant: str) -> None:
    raise ValueError(f"it has no {constant}")


def _number(text: str) -> float:
    """A number of JSON that has a point or an exponent; one that is whole is so however it is written.

    >>> _number("5.0"), _number("1e3"), _number("0.5")
    (5, 1000, 0.5)
    """
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MOST_WHOLE else value


def without_nulls(found: Mapping[str, Any]) -> dict[str, Any]:
    """An object without the keys that are null, which is what clients send for what is not given."""
    return {key: value for key, value in found.items() if value is not None}


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 0 is not False


def _complaint(error: ValidationError) -> ApiError:
    """About the first of the mistakes."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, place = first["type"], list(first["loc"])
    # Of the types that a value may have, the place names the one that it was compared with last.
    if place and isinstance(place[0], str) and place[0] in ("stop", "speculation"):
        allowed = {
            "stop": f"use a string, or a list of up to {MOST_STOPS}",
            "speculation": 'use "off", or how many tokens to draft per round',
        }
        return ApiError(400, f"{place[0]}: {allowed[place[0]]}", param=place[0])
    param = _param(place)
    told = {"extra_forbidden": "there is no such key", "missing": "it is missing"}.get(kind, first["msg"])
    return ApiError(400, f"{param}: {told}", param=param)


def _param(place: list[int | str]) -> str:
    """A place in a request, as a program would write it.

    >>> _param(["messages", 0, "role"])
    'messages[0].role'
    """
    named = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    written = repr(named.removeprefix("."))[1:-1]
    return written if len(written) <= MOST_PARAM else written[: MOST_PARAM - 3] + "..."


def _check(asked: Asked) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options is for streams: set stream too", param="stream_options")
    if isinstance(asked.stop, list) and len(asked.stop) > MOST_STOPS:
        raise ApiError(400, f"stop: {len(asked.stop)} strings, use at most {MOST_STOPS}", param="stop")
    wrong = next((key for key in asked.logit_bias if not re.fullmatch(TOKEN_ID, key)), None)
    if wrong is not None:
        raise ApiError(400, f"logit_bias: {one_line(wrong)} is no token id", param="logit_bias")
    if asked.response_format is not None:
        _check_format(asked.response_format, asked)
    if isinstance(asked, AskedChat) and asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs is for logprobs: set logprobs too", param="top_logprobs")
    if isinstance(asked, AskedChat) and asked.max_completion_tokens is not None and asked.max_tokens is not None:
        raise ApiError(400, "max_tokens is the old name of max_completion_tokens: give one of them", param="max_tokens")


def _check_format(given: ResponseFormat, asked: Asked) -> None:
    if (given.type == "json_schema") != (given.json_schema is not None):
        told = "give json_schema too" if given.json_schema is None else 'json_schema is for the type "json_schema"'
        raise ApiError(400, f"response_format: its type is {given.type!a}: {told}", param="response_format")
    if given.schema_of_answers is not None and -math.inf in asked.logit_bias.values():
        told = "it forbids a token that the answer may need: use at least -10000"
        raise ApiError(400, f"logit_bias: beside response_format {told}", param="logit_bias")

"""Request schemas: OpenAI's parameters as far as they are served, and vLLM's names for further ones.

A parameter that is not served is rejected by name, even if other servers ignore it.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, WithJsonSchema
from pydantic.config import JsonDict

from paradraft.core import NO_LIMIT
from paradraft.decode.logprobs import TokenLogprobs
from paradraft.engine.engine import Engine
from paradraft.errors import one_line
from paradraft.sampling_params import MOST_BIAS
from paradraft.serve.exchange import ApiError
from paradraft.serve.json_schema import NULLS, NUMBER, list_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paradraft.serve.grammar import CallGrammar

NOT_SERVED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "return_hidden_states": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters of OpenAI, or of vLLM's router, which writes them all, that are not served by one kind of request or by
both, and their neutral values, which are accepted."""
IGNORED = (
    "include_reasoning", "metadata", "prediction", "prompt_cache_key", "safety_identifier", "separate_reasoning",
    "service_tier", "store", "stream_reasoning", "user",
)  # fmt: skip
"""Parameters that change no text: they are accepted, and the answer names them in the header `IGNORED_HEADER`."""
IGNORED_HEADER = "X-Paradraft-Ignored"
MOST_STOPS = 4
MOST_WHOLE = 2**53
"""Largest range in which float64 represents every integer."""
MOST_PARAM = 60
"""Most characters of a parameter name in an error: clients may send any name."""
TOKEN_ID = "0|[1-9][0-9]{0,9}"
"""Pattern of the keys of `logit_bias`."""
LEAST = -9999.0
"""Log probability of 0, because JSON has no infinity."""
STRICT = ConfigDict(extra="forbid", strict=True)
STOP = {"type": "string", "pattern": "^[^\ufffd]+$"}
BIAS: JsonDict = {"minimum": -MOST_BIAS, "maximum": MOST_BIAS}


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


class StructuredOutputs(BaseModel):
    """vLLM's options of answers in JSON, as far as they are served."""

    model_config = STRICT
    disable_any_whitespace: bool = False


class ApiRequest(BaseModel):
    """Parameters that completions and chat completions share, and what differs between them.

    Values that the engine checks are bounded in the JSON schema alone: its errors name the value and the fix.
    """

    model_config = ConfigDict(**STRICT, json_schema_extra=NULLS)
    model: str | None = None
    n: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, json_schema_extra={"minimum": -(2**63), "maximum": 2**63 - 1})
    temperature: float = Field(
        default=1.0, json_schema_extra={"anyOf": [{"const": 0}, {"minimum": 1e-6, "maximum": 1e6}]}
    )
    top_p: float = Field(default=1.0, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    top_k: int = Field(default=0, json_schema_extra={"minimum": 0})
    min_p: float = Field(default=0.0, json_schema_extra={"minimum": 0, "maximum": 1})
    presence_penalty: float = Field(default=0.0, json_schema_extra=BIAS)
    frequency_penalty: float = Field(default=0.0, json_schema_extra=BIAS)
    repetition_penalty: float = Field(default=1.0, json_schema_extra={"minimum": 1e-6, "maximum": 1e6})
    logit_bias: dict[str, float] = Field(
        default_factory=dict,
        json_schema_extra={"propertyNames": {"pattern": f"^({TOKEN_ID})$"}, "additionalProperties": NUMBER | BIAS},
    )
    max_tokens: int | None = Field(default=None, ge=1)
    stop: Annotated[str | list[str], WithJsonSchema({"anyOf": [STOP, list_of(STOP, maxItems=MOST_STOPS)]})] = Field(
        default_factory=list
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    speculation: Literal["off"] | int | None = None
    paradraft: bool = False
    _ignored: Sequence[str] = PrivateAttr(default=())

    prompts_name: ClassVar[str]
    """Name of the prompt parameter."""
    id_prefix: ClassVar[str]
    whole_name: ClassVar[str]
    """`object` of a response."""
    piece_name: ClassVar[str]
    """`object` of a stream event."""
    has_one_prompt: ClassVar[bool] = False
    """Whether all answers of a request are to the same prompt."""
    usual_limit: ClassVar[int] = NO_LIMIT
    """Token limit of a request that sets none."""
    whole_schema: ClassVar[dict[str, Any]]
    piece_schema: ClassVar[dict[str, Any]]
    logprobs_schema: ClassVar[dict[str, Any]]
    """JSON schemas of `whole` and `piece`, by field, and of `logprobs_json`."""

    @property
    def function_names(self) -> list[str]:
        """Names of functions that answers may call."""
        return []

    @property
    def stops(self) -> str | list[str]:
        """Stop strings."""
        return self.stop

    @property
    def is_constrained(self) -> bool:
        """Whether answers have a `constraint`."""
        return self.response_format is not None and self.response_format.schema_of_answers is not None

    def constraint(self, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any] | CallGrammar | None:
        """What all answers must be: JSON of a schema, or a call of a function; None for any text."""
        return None if self.response_format is None else self.response_format.schema_of_answers

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {IGNORED_HEADER: ", ".join(self._ignored)} if self._ignored else {}

    @property
    def reports_usage(self) -> bool:
        """Whether the last event of a stream has token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def is_compact(self) -> bool:
        """Whether answers in JSON have no whitespace between its parts."""
        return self.structured_outputs is not None and self.structured_outputs.disable_any_whitespace

    @property
    def limit_name(self) -> str:
        """Name of the parameter with the token limit."""
        return "max_tokens"

    @property
    @abstractmethod
    def most_logprobs(self) -> int | None:
        """Top tokens reported per position; None reports no log probabilities."""

    @abstractmethod
    def prompts(self) -> list[Any]:
        """Prompts, not validated yet; raises ValueError if there is none."""

    @abstractmethod
    def tokens(self, prompt: Any, engine: Engine) -> list[int]:
        """Token ids of a prompt; raises ValueError if it is no prompt."""

    @abstractmethod
    def whole(self, text: str) -> dict[str, Any]:
        """Fields of a choice for a whole answer's text."""

    @abstractmethod
    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Fields of a choice for the text of a stream event."""

    @abstractmethod
    def logprobs_json(
        self, tokens: Sequence[TokenLogprobs], shown: Callable[[int], tuple[str, str]], begin: int
    ) -> dict[str, Any]:
        """Field `logprobs` of a choice.

        Args:
            shown: name and text of a token.
            begin: characters of the answer before the first token.
        """

    def check(self) -> None:
        """Raises ApiError if parameters exclude each other, or one has a value that its type allows and we do not."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: set stream too", param="stream_options")
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise ApiError(400, f"stop: {len(self.stop)} strings, use at most {MOST_STOPS}", param="stop")
        wrong = next((key for key in self.logit_bias if not re.fullmatch(TOKEN_ID, key)), None)
        if wrong is not None:
            raise ApiError(400, f"logit_bias: {one_line(wrong)} is no token id", param="logit_bias")
        if self.is_compact and (self.response_format is None or self.response_format.schema_of_answers is None):
            message = "structured_outputs is for answers in JSON: set response_format too"
            raise ApiError(400, message, param="structured_outputs")
        if self.is_constrained and -math.inf in self.logit_bias.values():
            problem = "it forbids a token that the answer may need: use at least -10000"
            raise ApiError(400, f"logit_bias: beside response_format or a demanded call {problem}", param="logit_bias")
        if self.response_format is None:
            return
        kind, schema = self.response_format.type, self.response_format.json_schema
        if (kind == "json_schema") != (schema is not None):
            fix = "give json_schema too" if schema is None else 'json_schema is for the type "json_schema"'
            raise ApiError(400, f"response_format: its type is {kind!a}: {fix}", param="response_format")


RequestT = TypeVar("RequestT", bound=ApiRequest)


def read(body: bytes, schema: type[RequestT], defaults: Mapping[str, float] | None = None) -> RequestT:
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
    ignored = [name for name in IGNORED if parameters.pop(name, None) is not None]
    for name, harmless in NOT_SERVED.items():
        if name in schema.model_fields:
            continue
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
    request._ignored = ignored
    request.check()
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
    if path and isinstance(path[0], str) and path[0] in ("stop", "speculation", "tool_choice"):
        allowed = {
            "stop": f"use a string, or a list of up to {MOST_STOPS}",
            "speculation": 'use "off", or how many tokens to draft per round',
            "tool_choice": 'use "none", "auto", "required", or {"type": "function", "function": {"name": …}}',
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

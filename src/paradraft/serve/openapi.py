"""The OpenAPI document of a server: what it accepts, with its limits, and what it answers."""

from __future__ import annotations

from typing import Any

from fastapi import Security
from fastapi.security import HTTPBearer

from paradraft.serve.chat import ChatCompletionRequest, has_tools
from paradraft.serve.choices import Service
from paradraft.serve.completions import CompletionRequest
from paradraft.serve.json_schema import BOOLEAN, COUNT, NULL, NUMBER, STRING, list_of, object_of, or_null
from paradraft.serve.schemas import IGNORED, IGNORED_HEADER, NOT_SERVED, ApiRequest

OPENAPI = "3.2.0"
"""The first OpenAPI version that describes the events of a stream."""
ABOUT = (
    "Texts are those of the target model; a drafter changes their speed alone. Every parameter may be null, which is "
    "what is not given. Other addresses get 404, and other methods 405 with `Allow`, as an `Error` both. A request "
    "that this document allows may still get 400, if parameters conflict or a text is too long."
)
REFUSALS = {
    400: "The request is wrong: the message says what to change, `param` where.",
    401: "The API key is missing or wrong.",
    403: "A server without a key answers its own machine only: call it by 127.0.0.1 or localhost.",
    404: "There is no such model.",
    408: "The request took too long.",
    413: "The body is too long.",
    415: "The body does not say that it is JSON.",
    429: "Too many answers wait: come again.",
    500: "The answer has failed, which the server's log tells about.",
    503: "The server is shutting down.",
}
EVENTS = "Each event's data is a piece in JSON, or an error, which is the last one; after the last piece it is [DONE]."
JSON = "application/json"
REQUESTS: dict[str, type[ApiRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}


def keyed(key: str | None) -> list[Any]:
    """Describes the key; `Guard` has checked it before."""
    return [] if key is None else [Security(HTTPBearer(scheme_name="key", auto_error=False))]


def refused(key: str | None) -> tuple[int, ...]:
    """Statuses of a request that was refused."""
    return 400, 403 if key is None else 401, 404, 408, 413, 415, 429, 500, 503


def ref(name: str) -> dict[str, Any]:
    """Refers to a schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def json_content(name: str) -> dict[str, Any]:
    """Content of a schema."""
    return {JSON: {"schema": ref(name)}}


def event_content(name: str) -> dict[str, Any]:
    """Content of a stream."""
    pieces = [{"contentMediaType": JSON, "contentSchema": ref(each)} for each in (name, "Error")]
    data = STRING | {"anyOf": [{"const": "[DONE]"}, *pieces]}
    item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"description": EVENTS, "itemSchema": item}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses with errors."""
    retry = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    headers = {401: {"WWW-Authenticate": {"schema": STRING}}, 429: retry, 503: retry}
    return {
        status: {"description": REFUSALS[status], "content": json_content("Error"), "headers": headers.get(status, {})}
        for status in statuses
    }


def schemas(service: Service) -> dict[str, dict[str, Any]]:
    """JSON schemas of requests and answers, by name."""
    model, ended, text_or_null = {"const": service.model}, {"enum": ["stop", "length", "tool_calls"]}, or_null(STRING)
    listed = object_of(
        id=model, object={"const": "model"}, created=COUNT, owned_by=STRING, max_model_len=COUNT, lossless=BOOLEAN
    )
    error = object_of(message=STRING, type=STRING, param=text_or_null, code=text_or_null)
    usage = object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
    timings = object_of(
        prompt_n=COUNT, prompt_ms=NUMBER, predicted_n=COUNT, predicted_ms=NUMBER,
        predicted_per_second=or_null(NUMBER), draft_n=COUNT, draft_n_accepted=COUNT,
    )  # fmt: skip
    drafted = object_of(drafted_text=STRING, own_text=STRING, accepted=COUNT, drafted=COUNT, tokens=COUNT)
    schemas = {
        "Error": object_of(error=error),
        "Model": listed,
        "Version": object_of(version=STRING),
        "Tokens": object_of(tokens=list_of(COUNT), count=COUNT, max_model_len=COUNT),
        "Models": object_of(object={"const": "list"}, data=list_of(listed, minItems=1, maxItems=1)),
    }
    for request in REQUESTS.values():
        name = request.__name__.removesuffix("Request")
        prompt_ids = {"prompt_token_ids": list_of(COUNT)}
        of_body, of_choice = (prompt_ids, {}) if request.has_one_prompt else ({}, prompt_ids)
        shared = {"index": COUNT, "logprobs": or_null(request.logprobs_schema)}
        ids = {"token_ids": list_of(COUNT)} | of_choice
        whole = object_of(ids, **shared, **request.whole_schema, finish_reason=ended)
        piece = object_of(ids, **shared, **request.piece_schema, finish_reason=or_null(ended))
        envelope = {"id": STRING, "created": COUNT, "model": model}
        schemas[name] = object_of(
            of_body, **envelope, object={"const": request.whole_name}, choices=list_of(whole, minItems=1), usage=usage,
            timings=timings,
        )  # fmt: skip
        schemas[f"{name}Chunk"] = object_of(
            of_body | {"usage": or_null(usage), "paradraft": drafted, "timings": timings},
            **envelope, object={"const": request.piece_name}, choices=list_of(piece, maxItems=1),
        )  # fmt: skip
        schemas |= _request_schemas(request, service)
    return schemas


def _request_schemas(request: type[ApiRequest], service: Service) -> dict[str, dict[str, Any]]:
    """JSON schemas of the requests that this server accepts, and of their parts, by name."""
    schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
    parts, properties = schema.pop("$defs", {}), schema["properties"]
    for name, bounds in _bounds(service).items():
        properties.get(name, {}).update(bounds)
    for name, default in service.defaults.items():
        properties[name]["default"] = default
    for name in properties.keys() - schema["required"]:
        parameter = properties[name]
        if "type" in parameter:
            parameter["type"] = [parameter["type"], "null"]
        if "anyOf" in parameter and NULL not in parameter["anyOf"]:
            parameter["anyOf"] = [*parameter["anyOf"], NULL]
    for name in IGNORED:
        properties[name] = {"description": f"Changes no text, and is named in {IGNORED_HEADER}."}
    for name, neutral in NOT_SERVED.items():
        description = "Not served; what changes nothing is taken."
        properties.setdefault(name, {"description": description, "enum": [None, *neutral]})
    return {request.__name__: schema, **parts}


def _bounds(service: Service) -> dict[str, dict[str, Any]]:
    """Bounds of this server on parameters."""
    engine, limits = service.engine, service.limits
    token = {"type": "integer", "minimum": 0, "maximum": engine.target.lm.vocab_size - 1}
    room = engine.target.capacity - 1
    limit = {"maximum": min(limits.max_new_tokens, room)}
    prompts = [STRING | {"minLength": 1}, list_of(token, minItems=1, maxItems=room)]
    bounds: dict[str, dict[str, Any]] = {
        "model": {"enum": [*service.names, None]},
        "n": {"maximum": limits.max_batch + limits.max_queue},
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "prompt": {"anyOf": [*prompts, list_of({"anyOf": prompts}, minItems=1)]},
        "speculation": {"anyOf": [{"const": "off"}, COUNT | {"maximum": engine.speculation.k}]},
    }
    if not has_tools(str(engine.target.tokenizer.chat_template)):
        bounds |= {"tools": {"maxItems": 0}, "tool_choice": {"enum": ["none", "auto", None]}}
    if engine.speculation.gamma is not None:  # an engine that drafts ahead has neither
        bounds |= {"speculation": {"enum": [None]}, "logprobs": {"enum": [False, None]}}
    return bounds

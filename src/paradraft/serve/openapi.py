"""OpenAPI document of the server.

Request schemas come from the models that parse them (`schemas.py`), narrowed to this server's model, vocabulary and
limits. A request that the document allows may still get 400, if parameters conflict or a text is too long; a request
that it does not allow always gets 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from paradraft.engine.engine import MOST_LOGPROBS, Engine
from paradraft.sampling_params import MOST_BIAS
from paradraft.serve.limits import Limits
from paradraft.serve.schemas import MOST_STOPS, NOT_SERVED, TOKEN_ID, ApiRequest, AskedChat, AskedText

VERSION = "3.2.0"
"""The first OpenAPI version that describes the events of a stream."""
NULL = {"type": "null"}
TEXT = {"type": "string", "minLength": 1}
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
ABOUT = (
    "Texts are those of the target model; a drafter changes their speed alone. Every parameter may be null, which is "
    "what is not given. Other addresses get 404, and other methods 405 with `Allow`, as an `Error` both."
)


def document(
    engine: Engine, *, model: str, limits: Limits, has_key: bool, defaults: Mapping[str, float]
) -> dict[str, Any]:
    """Builds the document; `defaults` are the sampling parameters that a request leaves out."""
    components = _answers(model)
    for schema in (AskedText, AskedChat):
        components |= _question(schema, _bounds(engine, model, limits, schema), defaults)
    guard = 401 if has_key else 403
    questions = (400, guard, 404, 408, 413, 415, 429, 500, 503)
    everywhere = () if has_key else (403,)
    page = {"text/html": {"schema": {"type": "string"}}}
    numbers = {"text/plain": {"schema": {"type": "string"}}}
    paths: dict[str, Any] = {
        "/v1/completions": _post("Go on with texts", "AskedText", "TextAnswer", "TextPiece", questions),
        "/v1/chat/completions": _post(
            "The next message of a conversation", "AskedChat", "ChatAnswer", "ChatPiece", questions
        ),
        "/v1/models": _get("The model that is served", _json(_ref("Models")), (guard,)),
        "/health": _get("Whether new requests are let in", None, (*everywhere, 503)),
        "/metrics": _get("Counts and times, for Prometheus", numbers, everywhere),
        "/openapi.json": _get("This document", _json({"type": "object"}), everywhere),
        "/": _get("A page that asks prompts", page, everywhere),
    }
    spec: dict[str, Any] = {
        "openapi": VERSION,
        "info": {"title": "paradraft", "version": version("paradraft"), "description": ABOUT},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_key:
        spec["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
            (operation,) = paths[path].values()
            operation["security"] = [{"key": []}]
    return spec


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _list(items: Mapping[str, Any], **more: object) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _object(optional: Mapping[str, Any] | None = None, /, **properties: Any) -> dict[str, Any]:
    """Schema of an object with these required properties, the optional ones, and no others."""
    known = {**properties, **(optional or {})}
    return {"type": "object", "properties": known, "required": [*properties], "additionalProperties": False}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, NULL]}


def _get(summary: str, content: Mapping[str, Any] | None, refusals: tuple[int, ...]) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(content, refusals)}}


def _post(summary: str, question: str, answer: str, piece: str, refusals: tuple[int, ...]) -> dict[str, Any]:
    """Operation with a JSON body, answered by JSON or by an event stream."""
    description = (
        "Each event's data is a piece in JSON, or an error, which is the last one; after the last piece it is [DONE]."
    )
    data = {"anyOf": [{"const": "[DONE]"}, _within(_ref(piece)), _within(_ref("Error"))]}
    content = _json(_ref(answer)) | {
        "text/event-stream": {
            "description": description,
            "itemSchema": {"type": "object", "properties": {"data": {"type": "string"} | data}, "required": ["data"]},
        }
    }
    body = {"required": True, "content": _json(_ref(question))}
    return {"post": {"summary": summary, "requestBody": body, "responses": _responses(content, refusals)}}


def _within(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a string that holds JSON."""
    return {"contentMediaType": "application/json", "contentSchema": schema}


def _responses(content: Mapping[str, Any] | None, refusals: tuple[int, ...]) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "The answer.", **({"content": content} if content else {})}}
    for status in refusals:
        responses[str(status)] = {"description": REFUSALS[status], "content": _json(_ref("Error"))}
        if status in (429, 503):
            responses[str(status)]["headers"] = {
                "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}
            }
        if status == 401:
            responses[str(status)]["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return responses


def _question(schema: type[ApiRequest], bounds: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Schema of a request and of its parts, by name; `bounds` and `defaults` override those of the pydantic model."""
    json_schema = schema.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = json_schema.pop("$defs", {})
    properties = {
        name: _parameter(
            {**field, **({"default": defaults[name]} if name in defaults else {})},
            bounds.get(name, {}),
            is_required=name in json_schema["required"],
        )
        for name, field in json_schema["properties"].items()
    }
    for name, harmless in NOT_SERVED.items():
        description = "Not served; what changes nothing is taken."
        properties.setdefault(name, {"description": description, "enum": [None, *harmless]})
    if "Message" in parts:
        parts["Message"]["properties"]["content"] = {"anyOf": [{"type": "string"}, _list(_ref("TextPart"), minItems=1)]}
        parts["Message"]["additionalProperties"] = NULL
        parts["TextPart"] = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
    return {schema.__name__: {**json_schema, "properties": properties, "additionalProperties": NULL}, **parts}


def _parameter(field: Mapping[str, Any], bounds: Mapping[str, Any], *, is_required: bool) -> dict[str, Any]:
    plain = {key: value for key, value in field.items() if key not in ("title", "default", "anyOf")}
    kinds = [kind for kind in field.get("anyOf", ()) if kind != NULL]
    if len(kinds) == 1:
        plain |= kinds[0]
    elif kinds:
        plain["anyOf"] = kinds
    narrowed = bounds if "anyOf" in bounds or bounds == NULL else {**plain, **bounds}
    if is_required:
        return dict(narrowed)
    default = {"default": field["default"]} if field.get("default") is not None else {}
    return {**_or_null(narrowed), **default}


def _bounds(engine: Engine, model: str, limits: Limits, schema: type[ApiRequest]) -> dict[str, Any]:
    """Bounds of this server on the parameters of a request."""
    token = {"type": "integer", "minimum": 0, "maximum": engine.target.lm.vocab_size - 1}
    room = engine.target.capacity - 1
    limit = {"minimum": 1, "maximum": min(limits.max_new_tokens, room)}
    string = {"type": "string", "pattern": "^[^\ufffd]+$"}
    text_or_ids = [TEXT, _list(token, minItems=1, maxItems=room)]
    bounds: dict[str, Any] = {
        "model": {"const": model},
        "n": {"maximum": limits.max_batch + limits.max_queue},
        "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
        "temperature": {"anyOf": [{"const": 0}, {"type": "number", "minimum": 1e-6, "maximum": 1e6}]},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": 0},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {"minimum": 1e-6, "maximum": 1e6},
        "presence_penalty": {"minimum": -MOST_BIAS, "maximum": MOST_BIAS},
        "frequency_penalty": {"minimum": -MOST_BIAS, "maximum": MOST_BIAS},
        "logit_bias": {
            "propertyNames": {"pattern": f"^({TOKEN_ID})$"},
            "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
        },
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "stop": {"anyOf": [string, _list(string, maxItems=MOST_STOPS)]},
        "prompt": {"anyOf": [*text_or_ids, _list({"anyOf": text_or_ids}, minItems=1)]},
        "speculation": {
            "anyOf": [{"const": "off"}, {"type": "integer", "minimum": 0, "maximum": engine.speculation.k}]
        },
    }
    if schema is AskedText:
        bounds["logprobs"] = {"minimum": 0, "maximum": MOST_LOGPROBS}
    if engine.speculation.gamma is not None:  # an engine that drafts ahead has neither
        bounds |= {"speculation": NULL, "logprobs": NULL if schema is AskedText else {"const": False}}
    return bounds


def _answers(model: str) -> dict[str, Any]:
    count, text, number = {"type": "integer", "minimum": 0}, {"type": "string"}, {"type": "number"}
    ended = {"enum": ["stop", "length"]}
    token = {
        "token": text,
        "logprob": number,
        "bytes": _or_null(_list({"type": "integer", "minimum": 0, "maximum": 255})),
    }
    text_logprobs = _object(
        tokens=_list(text),
        token_logprobs=_list(number),
        top_logprobs=_list({"type": "object", "additionalProperties": number}),
        text_offset=_list(count),
    )
    message_logprobs = _object(content=_list(_object(**token, top_logprobs=_list(_object(**token)))), refusal=NULL)
    drafted = _object(drafted_text=text, own_text=text, accepted=count, drafted=count, tokens=count)
    message = _object(role={"const": "assistant"}, content=text, refusal=NULL)
    delta = _object({"role": {"const": "assistant"}}, content=text)

    # With `return_token_ids`; a conversation has one prompt, the choices of a completion may have different ones.
    ids = {"token_ids": _list(count)}
    prompt_ids = {"prompt_token_ids": _list(count)}

    def whole(kind: str, logprobs: Mapping[str, Any], **written: Any) -> dict[str, Any]:
        of_choice, of_all = (ids | prompt_ids, {}) if "text" in written else (ids, prompt_ids)
        choice = _object(of_choice, index=count, **written, logprobs=_or_null(logprobs), finish_reason=ended)
        return _object(of_all, **envelope(kind), choices=_list(choice, minItems=1), usage=_ref("Usage"))

    def piece(kind: str, logprobs: Mapping[str, Any], **written: Any) -> dict[str, Any]:
        of_choice, of_all = (ids | prompt_ids, {}) if "text" in written else (ids, prompt_ids)
        choice = _object(of_choice, index=count, **written, logprobs=_or_null(logprobs), finish_reason=_or_null(ended))
        more = {"usage": _or_null(_ref("Usage")), "paradraft": drafted} | of_all
        return _object(more, **envelope(kind), choices=_list(choice, maxItems=1))

    def envelope(kind: str) -> dict[str, Any]:
        return {"id": text, "object": {"const": kind}, "created": count, "model": {"const": model}}

    listed = _object(id={"const": model}, object={"const": "model"}, created=count, owned_by=text, max_model_len=count)
    error = {"message": text, "type": text, "param": _or_null(text), "code": _or_null(text)}
    return {
        "TextAnswer": whole("text_completion", text_logprobs, text=text),
        "TextPiece": piece("text_completion", text_logprobs, text=text),
        "ChatAnswer": whole("chat.completion", message_logprobs, message=message),
        "ChatPiece": piece("chat.completion.chunk", message_logprobs, delta=delta),
        "Usage": _object(prompt_tokens=count, completion_tokens=count, total_tokens=count),
        "Models": _object(object={"const": "list"}, data=_list(listed, minItems=1, maxItems=1)),
        "Error": _object(error=_object(**error)),
    }

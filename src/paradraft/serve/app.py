"""FastAPI application: access, routes, and the OpenAPI document."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Security
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paradraft.engine.engine import Engine
from paradraft.errors import one_line
from paradraft.serve.address import is_loopback
from paradraft.serve.admission import Admission, ending
from paradraft.serve.chat import ChatCompletionRequest
from paradraft.serve.choices import Service
from paradraft.serve.completions import CompletionRequest
from paradraft.serve.endpoint import Completion, Tokenization
from paradraft.serve.exchange import ApiError, JsonReply
from paradraft.serve.grammar import Grammars
from paradraft.serve.limits import Limits
from paradraft.serve.metrics import Metrics
from paradraft.serve.schemas import (
    COUNT,
    IGNORED,
    IGNORED_HEADER,
    NOT_SERVED,
    NULL,
    NUMBER,
    STRING,
    ApiRequest,
    list_of,
    object_of,
    or_null,
)

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
"""`Host` header in lower case: a name or an address, and optionally a port."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
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
KEYED = ("/v1", "/tokenize")
REQUESTS: dict[str, type[ApiRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}


def names_this_machine(host: bytes) -> bool:
    """Whether a `Host` header is a loopback address.

    >>> names_this_machine(b"127.0.0.1:8000"), names_this_machine(b"[::1]"), names_this_machine(b"127.evil.example")
    (True, True, False)
    """
    match = HOST.fullmatch(host.decode("latin-1").lower())
    return match is not None and is_loopback(match[1].strip("[]"))


class Guard:
    """ASGI middleware that rejects unauthorized requests.

    Args:
        key: API key of requests to `KEYED`. None, on a server bound to loopback: requests must then have a loopback
            `Host`, which those from a page of another site do not have (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or rejects it."""
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error.reply(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy may end the request where the other one says, and take its rest for the request of another client.
            message = "the request has both Transfer-Encoding and Content-Length: send one of them"
            return ApiError(400, message, headers={"Connection": "close"})
        if self._key is None:
            if names_this_machine(headers.get(b"host", b"")):
                return None
            return ApiError(403, "this server is for its own machine: call it by 127.0.0.1 or localhost, or set a key")
        if not scope["path"].startswith(KEYED):
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key):
            return None
        message = "the API key is missing or wrong: send Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def new_app(
    engine: Engine,
    *,
    names: Sequence[str],
    limits: Limits,
    key: str | None = None,
    defaults: Mapping[str, float] | None = None,
) -> tuple[FastAPI, Admission]:
    """Builds an application that answers requests with an engine, and its admission control.

    Args:
        names: of the model in requests; the first is in answers.
        key: API key that requests must send.
        defaults: sampling parameters that a request leaves out, by name; the rest have OpenAI's defaults.
    """
    admission = Admission(limits)
    slow_models = sum(bool(lm.refusals) for lm in (engine.target.lm, *engine.drafter.models))
    metrics = Metrics(names[0], admission, slow_models, engine.payoff)
    service = Service(
        engine=engine, admission=admission, metrics=metrics, grammars=Grammars(engine.target.facts), names=names,
        limits=limits, defaults=defaults or {},
    )  # fmt: skip
    # FastAPI's pages load scripts from other hosts.
    app = FastAPI(
        title="paradraft", version=version("paradraft"), description=ABOUT, docs_url=None, redoc_url=None,
        openapi_url=None, default_response_class=JsonReply, exception_handlers={HTTPException: _complain},
    )  # fmt: skip
    app.openapi_version = OPENAPI
    app.add_middleware(Guard, key=key)
    _add_completions(app, service, key)
    _add_tokenize(app, service, key)
    _add_others(app, service, key)
    return app, admission


def _add_completions(app: FastAPI, service: Service, key: str | None) -> None:
    def of(schema: type[ApiRequest]) -> Callable[[], Awaitable[Response]]:
        async def complete() -> Response:
            return Completion(service, schema)

        return complete

    for path, schema in REQUESTS.items():
        name = schema.__name__.removesuffix("Request")
        app.add_api_route(
            path,
            of(schema),
            methods=["POST"],
            description=schema.__doc__,
            dependencies=_keyed(key),
            responses={200: {"content": _json(name) | _events(f"{name}Chunk")}, **_refusals(*_refused(key))},
            openapi_extra={"requestBody": {"required": True, "content": _json(schema.__name__)}},
        )


def _add_tokenize(app: FastAPI, service: Service, key: str | None) -> None:
    async def tokenize() -> Response:
        """The token ids of a prompt, in a request for either kind of completions."""
        return Tokenization(service)

    requests = {JSON: {"schema": {"anyOf": [_ref(schema.__name__) for schema in REQUESTS.values()]}}}
    app.add_api_route(
        "/tokenize",
        tokenize,
        methods=["POST"],
        dependencies=_keyed(key),
        responses={200: {"content": _json("Tokens")}, **_refusals(*_refused(key))},
        openapi_extra={"requestBody": {"required": True, "content": requests}},
    )


def _refused(key: str | None) -> tuple[int, ...]:
    """Statuses of a request that was refused."""
    return 400, 403 if key is None else 401, 404, 408, 413, 415, 429, 500, 503


def _add_others(app: FastAPI, service: Service, key: str | None) -> None:
    engine, guarded, created = service.engine, _refusals(*[403] * (key is None)), int(time.time())
    models_refused = _refusals(403 if key is None else 401)

    served = {
        "id": service.model, "object": "model", "created": created, "owned_by": "paradraft",
        "max_model_len": engine.target.capacity,
    }  # fmt: skip

    @app.get("/v1/models", dependencies=_keyed(key), responses={200: {"content": _json("Models")}, **models_refused})
    async def models() -> Response:
        """The model that is served."""
        return JsonReply({"object": "list", "data": [served]})

    @app.get(
        "/v1/models/{name:path}", dependencies=_keyed(key),
        responses={200: {"content": _json("Model")}, **models_refused, **_refusals(404)},
    )  # fmt: skip
    async def model(name: str) -> Response:
        """The model by one of its names."""
        if name in service.names:
            return JsonReply(served)
        message = f"{one_line(name)} is not served here, which is {service.model!a}"
        return ApiError(404, message, param="model", code="model_not_found").reply

    @app.get("/version", responses={200: {"content": _json("Version")}, **guarded})
    async def versions() -> Response:
        """The version of paradraft."""
        return JsonReply({"version": version("paradraft")})

    @app.get("/health", response_class=Response, responses=guarded | _refusals(503))
    async def health() -> Response:
        """Whether new requests are let in."""
        return ending().reply if service.admission.is_closing else Response()

    @app.get("/metrics", response_class=PlainTextResponse, responses=guarded)
    async def counts() -> Response:
        """Counts and times, for Prometheus."""
        return Response(service.metrics.text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", response_class=HTMLResponse, responses=guarded)
    async def page() -> Response:
        """A page that asks prompts."""
        text = files("paradraft.serve").joinpath("page.html").read_text(encoding="utf-8")
        text = text.replace("{{temperature}}", f"{service.defaults.get('temperature', 0):g}")
        text = text.replace("{{chat}}", "checked" if engine.target.is_instruct else "")
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    @app.get("/openapi.json", responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}, **guarded})
    async def openapi() -> Response:
        """This document."""
        return JsonReply(described)

    described = app.openapi()
    described.setdefault("components", {})["schemas"] = _schemas(service)


async def _complain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path)
    messages = {404: f"there is nothing at {path}", 405: f"{path} is not asked by {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).reply


def _keyed(key: str | None) -> list[Any]:
    """Describes the key; `Guard` has checked it before."""
    return [] if key is None else [Security(HTTPBearer(scheme_name="key", auto_error=False))]


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str) -> dict[str, Any]:
    """Content of a schema."""
    return {JSON: {"schema": _ref(name)}}


def _events(name: str) -> dict[str, Any]:
    """Content of a stream."""
    pieces = [{"contentMediaType": JSON, "contentSchema": _ref(each)} for each in (name, "Error")]
    data = STRING | {"anyOf": [{"const": "[DONE]"}, *pieces]}
    item = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"description": EVENTS, "itemSchema": item}}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    retry = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    headers = {401: {"WWW-Authenticate": {"schema": STRING}}, 429: retry, 503: retry}
    return {
        status: {"description": REFUSALS[status], "content": _json("Error"), "headers": headers.get(status, {})}
        for status in statuses
    }


def _schemas(service: Service) -> dict[str, dict[str, Any]]:
    """JSON schemas of requests and answers, by name."""
    model, ended, text_or_null = {"const": service.model}, {"enum": ["stop", "length"]}, or_null(STRING)
    listed = object_of(id=model, object={"const": "model"}, created=COUNT, owned_by=STRING, max_model_len=COUNT)
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
    if engine.speculation.gamma is not None:  # an engine that drafts ahead has neither
        bounds |= {"speculation": {"enum": [None]}, "logprobs": {"enum": [False, None]}}
    return bounds

"""FastAPI application: access, routes, and the OpenAPI document."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paradraft.engine.engine import Engine
from paradraft.serve.address import is_loopback
from paradraft.serve.admission import Admission, ending
from paradraft.serve.choices import Service
from paradraft.serve.endpoint import Completion, TokenizeReply, not_served
from paradraft.serve.exchange import ApiError, JsonReply
from paradraft.serve.grammar import Grammars
from paradraft.serve.limits import Limits
from paradraft.serve.metrics import Metrics
from paradraft.serve.openapi import (
    ABOUT,
    JSON,
    OPENAPI,
    REQUESTS,
    event_content,
    json_content,
    keyed,
    ref,
    refusals,
    refused,
    schemas,
)
from paradraft.serve.page import chat_page
from paradraft.serve.schemas import ApiRequest
from paradraft.verify import warning_of

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
"""`Host` header in lower case: a name or an address, and optionally a port."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
KEYED = ("/v1", "/tokenize")


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
            dependencies=keyed(key),
            responses={200: {"content": json_content(name) | event_content(f"{name}Chunk")}, **refusals(*refused(key))},
            openapi_extra={"requestBody": {"required": True, "content": json_content(schema.__name__)}},
        )


def _add_tokenize(app: FastAPI, service: Service, key: str | None) -> None:
    async def tokenize() -> Response:
        """The token ids of a prompt, in a request for either kind of completions."""
        return TokenizeReply(service)

    requests = {JSON: {"schema": {"anyOf": [ref(schema.__name__) for schema in REQUESTS.values()]}}}
    app.add_api_route(
        "/tokenize",
        tokenize,
        methods=["POST"],
        dependencies=keyed(key),
        responses={200: {"content": json_content("Tokens")}, **refusals(*refused(key))},
        openapi_extra={"requestBody": {"required": True, "content": requests}},
    )


def _add_others(app: FastAPI, service: Service, key: str | None) -> None:
    engine, guarded, created = service.engine, refusals(*[403] * (key is None)), int(time.time())
    models_refused = refusals(403 if key is None else 401)

    served = {
        "id": service.model, "object": "model", "created": created, "owned_by": "paradraft",
        "max_model_len": engine.target.capacity, "lossless": warning_of(engine.speculation.verify) is None,
    }  # fmt: skip

    @app.get(
        "/v1/models", dependencies=keyed(key), responses={200: {"content": json_content("Models")}, **models_refused}
    )
    async def models() -> Response:
        """The model that is served."""
        return JsonReply({"object": "list", "data": [served]})

    @app.get(
        "/v1/models/{name:path}", dependencies=keyed(key),
        responses={200: {"content": json_content("Model")}, **models_refused, **refusals(404)},
    )  # fmt: skip
    async def model(name: str) -> Response:
        """The model by one of its names."""
        return JsonReply(served) if name in service.names else not_served(name, service).reply

    @app.get("/version", responses={200: {"content": json_content("Version")}, **guarded})
    async def versions() -> Response:
        """The version of paradraft."""
        return JsonReply({"version": version("paradraft")})

    @app.get("/health", response_class=Response, responses=guarded | refusals(503))
    async def health() -> Response:
        """Whether new requests are let in."""
        return ending().reply if service.admission.is_closing else Response()

    @app.get("/metrics", response_class=PlainTextResponse, responses=guarded)
    async def counts() -> Response:
        """Counts and times, for Prometheus."""
        return Response(service.metrics.text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", response_class=HTMLResponse, responses=guarded)
    async def page() -> Response:
        """A page to chat with the model."""
        return HTMLResponse(document, headers={"Content-Security-Policy": POLICY})

    @app.get("/openapi.json", responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}, **guarded})
    async def openapi() -> Response:
        """This document."""
        return JsonReply(described)

    document = chat_page(service.model, service.defaults.get("temperature", 0), is_chat=engine.target.is_instruct)
    described = app.openapi()
    described.setdefault("components", {})["schemas"] = schemas(service)


async def _complain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path)
    messages = {404: f"there is nothing at {path}", 405: f"{path} is not asked by {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).reply

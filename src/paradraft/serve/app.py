"""FastAPI application: routes, guard and error handler."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paradraft.engine.engine import Engine
from paradraft.serve.admission import Admission, ending
from paradraft.serve.answers import Answers
from paradraft.serve.chat import ChatCompletions
from paradraft.serve.completions import Completions
from paradraft.serve.endpoint import CompletionEndpoint
from paradraft.serve.forms import Form
from paradraft.serve.grammar import Grammars
from paradraft.serve.guard import Guard
from paradraft.serve.limits import Limits
from paradraft.serve.metrics import Metrics
from paradraft.serve.openapi import document
from paradraft.serve.replies import ApiError, JsonReply

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def new_app(
    engine: Engine,
    *,
    model: str,
    limits: Limits,
    key: str | None = None,
    defaults: Mapping[str, float] | None = None,
) -> tuple[FastAPI, Admission]:
    """Builds an application that answers requests with an engine, and its admission control.

    Args:
        model: served model name.
        key: API key that requests must send.
        defaults: sampling parameters that a request leaves out, by name; the rest have OpenAI's defaults.
    """
    defaults = defaults or {}
    admission = Admission(limits)
    slow_models = sum(bool(lm.refusals) for lm in (engine.target.lm, *engine.drafter.models))
    metrics = Metrics(model, admission, slow_models, engine.payoff)
    answers, grammars = Answers(engine, admission, metrics), Grammars(engine.target.facts)
    # FastAPI's pages load scripts from other hosts, and its document omits routes that are no FastAPI routes.
    app = FastAPI(title="paradraft", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, key=key)
    forms: dict[str, Form] = {"/v1/completions": Completions(), "/v1/chat/completions": ChatCompletions()}
    for path, form in forms.items():
        app.router.routes.append(
            Route(path, CompletionEndpoint(form, answers, grammars, model, limits, defaults), methods=["POST"])
        )
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        served = {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "paradraft",
            "max_model_len": engine.target.capacity,
        }
        return JsonReply({"object": "list", "data": [served]})

    @app.get("/health")
    async def health() -> Response:
        return ending().reply if admission.is_closing else Response()

    @app.get("/metrics")
    async def counts() -> Response:
        return Response(metrics.text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    described = document(engine, model=model, limits=limits, has_key=key is not None, defaults=defaults)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JsonReply(described)

    @app.get("/")
    async def page() -> Response:
        text = files("paradraft.serve").joinpath("page.html").read_text(encoding="utf-8")
        text = text.replace("{{temperature}}", f"{defaults.get('temperature', 0):g}")
        text = text.replace("{{chat}}", "checked" if engine.target.is_instruct else "")
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})

    @app.exception_handler(HTTPException)
    async def complain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = ascii(request.url.path)
        messages = {404: f"there is nothing at {path}", 405: f"{path} is not asked by {request.method}"}
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).reply

    return app, admission

"""API key check; without a key only requests with an allowed Host header."""

from __future__ import annotations

import hmac
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from paradraft.serve.address import is_loopback
from paradraft.serve.replies import ApiError

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
"""`Host` header in lower case: a name or an address, and optionally a port."""


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
        key: API key of requests to `/v1`. None, on a server bound to loopback: requests must then have a loopback
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
        if self._key is None:
            if names_this_machine(headers.get(b"host", b"")):
                return None
            return ApiError(403, "this server is for its own machine: call it by 127.0.0.1 or localhost, or set a key")
        if not scope["path"].startswith("/v1"):
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key):
            return None
        message = "the API key is missing or wrong: send Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

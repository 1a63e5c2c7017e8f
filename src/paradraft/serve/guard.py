"""Who may ask: whoever has the key, if there is one, and on a server without one only who has called it by its name."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from paradraft.serve.replies import ApiError

LOCAL_NAMES = (b"localhost", b"127.0.0.1", b"[::1]")


class Guard:
    """Stands before an application and refuses requests.

    Args:
        app: what it guards.
        key: what requests to `/v1` must have; None for no key, on a server that only its own machine can reach. Then a
            request must name this machine as its host, which one from a page of another site does not.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._wanted = None if key is None else b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, or refuses it."""
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error.reply(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._wanted is None:
            host = headers.get(b"host", b"").lower()
            name = host if host.endswith(b"]") else host.rpartition(b":")[0] or host
            if name in LOCAL_NAMES or name.startswith(b"127."):
                return None
            return ApiError(403, "this server is for its own machine: call it by 127.0.0.1 or localhost, or set a key")
        if not scope["path"].startswith("/v1"):
            return None
        if hmac.compare_digest(headers.get(b"authorization", b""), self._wanted):
            return None
        return ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")

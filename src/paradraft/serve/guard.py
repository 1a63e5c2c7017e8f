"""Who may ask: whoever has the key, if there is one, and on a server without one only who has called it by its name."""

from __future__ import annotations

import hmac
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from paradraft.serve.address import is_loopback
from paradraft.serve.replies import ApiError

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]{1,5})?")
"""The `Host` of a request, in small letters: a name or an address, and perhaps a port."""


def names_this_machine(host: bytes) -> bool:
    """Whether the `Host` of a request is an address of this machine alone.

    >>> names_this_machine(b"127.0.0.1:8000"), names_this_machine(b"[::1]"), names_this_machine(b"127.evil.example")
    (True, True, False)
    """
    found = HOST.fullmatch(host.decode("latin-1").lower())
    return found is not None and is_loopback(found[1].strip("[]"))


class Guard:
    """Stands before an application and refuses requests.

    Args:
        app: what it guards.
        key: what requests to `/v1` must have; None for no key, on a server that only its own machine can reach. Then a
            request must name this machine as its host, which one from a page of another site does not.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, or refuses it."""
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
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key):
            return None
        message = "the API key is missing or wrong: send Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

"""What is sent: JSON, and errors in the shape that OpenAI's clients know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""By status; any other is `invalid_request_error`."""


class ApiError(Exception):
    """A request that is not answered, or not to its end.

    Args:
        status: of HTTP.
        message: in one line, for people.
        param: which key of the request is to blame.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def reply(self) -> Response:
        """As a response."""
        return JsonReply(self.body, status_code=self.status, headers=self.headers)


class JsonReply(Response):
    """A response in JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """As bytes."""
        return to_json(content)


def to_json(content: object) -> bytes:
    """JSON in ASCII, so that half a character, which a client may send and an error repeat, can be sent too."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def event(content: object) -> bytes:
    """JSON as one event of a stream."""
    return b"data: " + to_json(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

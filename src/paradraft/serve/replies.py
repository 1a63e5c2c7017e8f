"""JSON responses, stream events, and errors in OpenAI's format."""

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
"""Error types by status; others are `invalid_request_error`."""


class ApiError(Exception):
    """Error response in OpenAI's format.

    Args:
        message: one line, for people.
        param: the wrong key of the request.
        code: for programs.
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
        """JSON body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def reply(self) -> Response:
        """Response with this error."""
        return JsonReply(self.body, status_code=self.status, headers=self.headers)


class JsonReply(Response):
    """JSON response in ASCII."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """JSON as bytes."""
        return to_json(content)


def to_json(content: object) -> bytes:
    """JSON in ASCII, so that lone surrogates, which a client may send and an error may repeat, can be encoded."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def event(content: object) -> bytes:
    """Server-sent event with JSON data."""
    return b"data: " + to_json(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""

"""HTTP client of OpenAI-compatible servers, such as vLLM's: address and key, retries, error messages, streams."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from paradraft.errors import one_line

CONNECT_S = 20.0
BACKOFF_S, MOST_BACKOFF_S = 1.0, 60.0
"""Wait before the first retry, doubled before each further one, and its maximum."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses, besides 5xx, after which a retry may succeed."""
FATAL = frozenset({401, 402, 404, 405})
"""Statuses that every request would get: no key, no money, no such model or address."""


class RefusedError(Exception):
    """The server rejects this request; a retry would not help."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"status {status}: {reason}")
        self.status = status


class SilentError(Exception):
    """The server did not answer; a later run may succeed."""


@dataclass(frozen=True, kw_only=True)
class OpenAIClient:
    """A model of a server.

    Args:
        url: up to and including the version, such as "http://localhost:8000/v1".
        api_key: sent as a bearer token.
        timeout_s: of one answer.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        try:
            is_url = httpx2.URL(self.url).scheme in ("http", "https") and bool(httpx2.URL(self.url).host)
        except httpx2.InvalidURL:
            is_url = False
        if not is_url:
            raise ValueError(f"endpoint {self.url!r}: write it like http://localhost:8000/v1")

    def address(self, path: str) -> str:
        """URL of a path of the API, such as "/models"."""
        return f"{self.url.rstrip('/')}{path}"

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def check_model(self) -> None:
        """Raises ValueError if the server cannot be reached, or does not know the model."""
        try:
            with httpx2.Client(headers=self._headers, timeout=CONNECT_S) as http:
                response = http.get(self.address("/models"))
        except httpx2.RequestError as error:
            raise ValueError(f"endpoint {self.url} cannot be reached: {reason_of(error)}") from None
        if response.status_code == 404:
            raise ValueError(f"endpoint {self.url} has no /models: its address most often ends in /v1")
        if response.status_code in (401, 403):
            raise ValueError(
                f"endpoint {self.url} wants another key (status {response.status_code}): name its variable with "
                "--api-key-env"
            )
        if response.status_code != 200:
            raise ValueError(f"endpoint {self.url} cannot be used: /models gives {complaint_of(response)}")
        known = _models_of(response)
        if known is None:
            raise ValueError(f"endpoint {self.url} does not list its models: is it OpenAI-compatible?")
        # After a colon some servers take the name of an adapter, which they do not list.
        if not {self.model, self.model.partition(":")[0]} & set(known):
            raise ValueError(f"endpoint {self.url} has no model {self.model!r}: it has {', '.join(known) or 'none'}")

    def run(self, work: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, None]], concurrency: int) -> None:
        """Runs several tasks of `work` at a time, which share one connection pool; raises the first error."""
        asyncio.run(self._run(work, concurrency))

    async def _run(self, work: Callable[[httpx2.AsyncClient], Coroutine[Any, Any, None]], concurrency: int) -> None:
        limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        is_safe = self.url.startswith("https")  # without, certificates would be read for each client all the same
        async with httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout, verify=is_safe) as http:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work(http))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def post(self, http: httpx2.AsyncClient, path: str, body: Mapping[str, Any], retries: int) -> httpx2.Response:
        """Returns the response with status 200.

        Raises:
            RefusedError: the server rejects this request.
            SilentError: it did not answer, after all retries.
            ValueError: an error that every request would get.
        """
        for backoff_s in [*_backoffs_s(retries), None]:
            wait_s = 0.0
            try:
                async with asyncio.timeout(self.timeout_s):
                    response = await http.post(self.address(path), json=body)
            except TimeoutError:
                trouble = f"no answer within {self.timeout_s:g} s"
            except httpx2.RequestError as error:
                trouble = reason_of(error)
            else:
                if response.status_code == 200:
                    return response
                trouble = complaint_of(response)
                if response.status_code in FATAL:
                    raise ValueError(f"endpoint {self.url} gives {trouble}")
                if response.status_code not in PASSING and response.status_code < 500:
                    raise RefusedError(response.status_code, _message_of(response))
                wait_s = retry_after_s(response)
            if backoff_s is None or wait_s > self.timeout_s:
                break
            await asyncio.sleep(max(backoff_s, wait_s))
        raise SilentError(trouble)


async def events_of(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream.

    Raises:
        ValueError: it is no stream of JSON objects, or the server reports an error in it.
    """
    has_events = False
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ValueError(f"{response.url}: an event of the stream is no JSON object: {one_line(data)}")
        if "error" in event:
            raise ValueError(f"{response.url}: the answer broke off: {one_line(event['error'])}")
        has_events = True
        yield event
    if not has_events:
        raise ValueError(f"{response.url}: the answer is no stream of events: is it OpenAI-compatible?")


def complaint_of(response: httpx2.Response) -> str:
    """Status and error message of a response, in one line.

    >>> complaint_of(httpx2.Response(400, json={"error": {"message": "too long"}}))
    'status 400: too long'
    """
    return f"status {response.status_code}: {_message_of(response)}"


def _message_of(response: httpx2.Response) -> str:
    try:
        body = response.json()
        error = body.get("error", body)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        message = None
    return shortened(str(message or response.text or response.reason_phrase))


def reason_of(error: httpx2.HTTPError) -> str:
    """Message of an error of the connection, or its kind."""
    return str(error).strip() or type(error).__name__


def shortened(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} …"


def retry_after_s(response: httpx2.Response) -> float:
    """Seconds to wait according to the header `Retry-After`; 0 without it.

    Source: RFC 9110, section 10.2.3: a count of seconds or a date.

    >>> retry_after_s(httpx2.Response(429, headers={"Retry-After": "3"}))
    3.0
    """
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(0.0, seconds)  # in this order, NaN becomes 0 too


def _models_of(response: httpx2.Response) -> list[str] | None:
    """Names in the response of `/models`; None if it is not a list of models."""
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def _backoffs_s(retries: int) -> Iterator[float]:
    """Exponential backoff with jitter, so that requests that failed together are not retried together."""
    for retry in range(retries):
        yield min(BACKOFF_S * 2 ** min(retry, 30), MOST_BACKOFF_S) * random.uniform(0.5, 1.0)

"""Client for OpenAI-compatible endpoints, such as vLLM's: bounded concurrency, retries.

`/completions` continues a text, `/chat/completions` answers a conversation through the server's chat template.
Only the fields that vLLM, SGLang, llama.cpp and OpenAI have in common are read.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from paradraft.data.questions import EOS, LENGTH, Answer, Question, next_prompt
from paradraft.data.regenerate import Outcome
from paradraft.sampling_params import Sampling
from paradraft.text.chat_template import Message

REASONS = {"stop": EOS, "length": LENGTH}
"""Without stop strings, a server's "stop" is the model's own end."""
RESERVED = frozenset(
    {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed"}
    | {"n", "best_of", "stream", "echo", "stop", "stop_token_ids", "ignore_eos"}
)
"""Request fields that this module sets, or that would change the form of the response."""


class RefusedError(Exception):
    """The server rejects this request; a retry would not help."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"status {status}: {reason}")
        self.status = status


def request_of(
    prompt: str | list[Message],
    *,
    model: str,
    sampling: Sampling,
    seed: int,
    max_new_tokens: int,
    fields: Mapping[str, Any],
    chat_template_kwargs: Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """Returns path and body of the request for one turn.

    Temperature and top-p are always sent; top-k and min-p, which not every server knows, only if they have an
    effect; the variables of the chat template only with conversations.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    if isinstance(prompt, str):
        return "/completions", {**body, "prompt": prompt, **fields}
    if chat_template_kwargs:
        body["chat_template_kwargs"] = dict(chat_template_kwargs)
    return "/chat/completions", {**body, "messages": prompt, **fields}


def answer_of(response: httpx2.Response) -> Answer:
    """Reads the answer from a response with status 200.

    Raises:
        RefusedError: there is none, or neither the model nor the length limit ended it.
        ValueError: the server strips the reasoning from the text, so training would not see it.
    """
    try:
        body = response.json()
        choice = body["choices"][0]
        message = choice["message"] if "message" in choice else {"content": choice["text"]}
        text, reason, usage = message["content"], choice["finish_reason"], body.get("usage") or {}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        tokens = int(usage.get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise RefusedError(response.status_code, f"not a completion: {_short(response.text)}") from None
    if reasoning:
        raise ValueError("the endpoint takes the reasoning out of its answers: start it without a reasoning parser")
    if reason not in REASONS or not isinstance(text, str):
        raise RefusedError(response.status_code, f"no whole text: finish_reason={reason!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError(response.status_code, "the text has half a character in it") from None
    return Answer(text=text, finish_reason=REASONS[reason], tokens=tokens)


def models_of(response: httpx2.Response) -> list[str] | None:
    """Names in the response of `/models`; None if it is not a list of models."""
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def complaint_of(response: httpx2.Response) -> str:
    """Error message of a response, in one line.

    >>> complaint_of(httpx2.Response(400, json={"error": {"message": "too long"}}))
    'too long'
    """
    try:
        body = response.json()
        error = body.get("error", body)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        message = None
    return _short(str(message or response.text or response.reason_phrase))


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


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]} …"


BACKOFF_S, MOST_BACKOFF_S = 1.0, 60.0
"""Wait before the first retry, doubled before each further one, and its maximum."""
CONNECT_S = 20.0
FEWEST_IN_A_ROW = 8
"""Failures in a row after which the endpoint counts as down, if `concurrency` is smaller."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses, besides 5xx, after which a retry may succeed."""
FATAL = frozenset({401, 402, 404, 405})
"""Statuses that every request would get: no key, no money, no such model or address."""
TOO_LONG = frozenset({400, 413, 422})
"""Statuses for a conversation that exceeds the context length."""
SENT = ("temperature", "top_k", "top_p", "min_p", "seed")
"""The settings of `Sampling` that are sent."""


class SilentError(Exception):
    """The endpoint did not answer; a later run may succeed."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Sends conversations to `/chat/completions` and prompts to `/completions`.

    Args:
        url: up to and including the version, such as "http://localhost:8000/v1".
        sampling: temperature, top-k, top-p, min-p and seed; the seed of each turn is derived from it.
        concurrency: most requests at a time.
        fields: further fields of every request, such as sampling settings that only this server has.
        chat_template_kwargs: variables of the server's chat template, sent with conversations.
    """

    url: str
    model: str
    sampling: Sampling
    max_new_tokens: int
    concurrency: int = 32
    retries: int = 5
    timeout_s: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            is_url = httpx2.URL(self.url).scheme in ("http", "https") and bool(httpx2.URL(self.url).host)
        except httpx2.InvalidURL:
            is_url = False
        if not is_url:
            raise ValueError(f"endpoint {self.url!r}: write it like http://localhost:8000/v1")
        for name, least in (("max_new_tokens", 1), ("concurrency", 1), ("retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: use at least {least}")
        known = {name: getattr(self.sampling, name) for name in SENT}
        if self.sampling != Sampling(**known):
            raise ValueError(f"of sampling, only {', '.join(SENT)} are sent: name other settings as request fields")
        if taken := sorted(RESERVED & self.fields.keys()):
            raise ValueError(f"the request field {taken[0]!r} cannot be set: an option does, or the answers need it")
        if self.chat_template_kwargs and "chat_template_kwargs" in self.fields:
            raise ValueError("chat_template_kwargs is given twice, as an option and as a request field: give it once")
        if not 0.0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s}: use a number of seconds above 0")

    @property
    def settings(self) -> dict[str, object]:
        """Settings that decide the text of the answers; not the address, because a server may move."""
        sampling = {name: getattr(self.sampling, name) for name in SENT}
        return {
            "model": self.model,
            "max_new_tokens": self.max_new_tokens,
            # Files of former versions lack this setting, which counts as None.
            "chat_template_kwargs": dict(self.chat_template_kwargs) or None,
            **sampling,
            "fields": dict(self.fields),
        }

    def check(self, questions: list[Question]) -> None:
        """Raises ValueError if the endpoint cannot be reached, or does not know the model."""
        try:
            with httpx2.Client(headers=self._headers, timeout=CONNECT_S) as client:
                response = client.get(f"{self._base}/models")
        except httpx2.RequestError as error:
            raise ValueError(f"endpoint {self.url} cannot be reached: {_reason(error)}") from None
        if response.status_code == 404:
            raise ValueError(f"endpoint {self.url} has no /models: its address most often ends in /v1")
        if response.status_code in (401, 403):
            raise ValueError(
                f"endpoint {self.url} wants another key (status {response.status_code}): name its variable with "
                "--api-key-env"
            )
        if response.status_code != 200:
            trouble = f"status {response.status_code}: {complaint_of(response)}"
            raise ValueError(f"endpoint {self.url} cannot be used: /models gives {trouble}")
        known = models_of(response)
        if known is None:
            raise ValueError(f"endpoint {self.url} does not list its models: is it OpenAI-compatible?")
        # After a colon some servers take the name of an adapter, which they do not list.
        if not {self.model, self.model.partition(":")[0]} & set(known):
            raise ValueError(f"endpoint {self.url} has no model {self.model!r}: it has {', '.join(known) or 'none'}")

    def answer(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        """Answers all questions and passes each outcome to `take` at once.

        After many failures in a row the endpoint counts as down, and the remaining questions are not sent.

        Raises:
            ValueError: an error that every request would get.
        """
        asyncio.run(self._answer_all(questions, take))

    async def _answer_all(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        most_failures = max(self.concurrency, FEWEST_IN_A_ROW)
        failures = 0
        remaining = iter(questions)

        async def work(client: httpx2.AsyncClient) -> None:
            nonlocal failures
            while failures < most_failures and (question := next(remaining, None)) is not None:
                try:
                    outcome = await self._outcome(client, question)
                    failures = 0
                except SilentError as error:
                    outcome = Outcome(question=question, failure=str(error))
                    failures += 1
                take(outcome)

        limits = httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        async with httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=timeout) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.concurrency, len(questions))):
                        group.create_task(work(client))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _outcome(self, client: httpx2.AsyncClient, question: Question) -> Outcome:
        answers: list[Answer] = []
        while (prompt := next_prompt(question, answers)) is not None:
            try:
                answers.append(await self._ask(client, prompt, question.seed(self.sampling.seed, len(answers))))
            except RefusedError as error:
                if not (answers and error.status in TOO_LONG):
                    return Outcome(question=question, failure=str(error))
                break
        return Outcome(question=question, answers=tuple(answers))

    async def _ask(self, client: httpx2.AsyncClient, prompt: str | list[Message], seed: int) -> Answer:
        """Answers one turn; raises `RefusedError` or `SilentError` if there is no answer."""
        path, body = request_of(
            prompt, model=self.model, sampling=self.sampling, seed=seed, max_new_tokens=self.max_new_tokens,
            fields=self.fields, chat_template_kwargs=self.chat_template_kwargs,
        )  # fmt: skip
        for backoff_s in [*_backoffs_s(self.retries), None]:
            wait_s = 0.0
            try:
                async with asyncio.timeout(self.timeout_s):
                    response = await client.post(f"{self._base}{path}", json=body)
            except TimeoutError:
                trouble = f"no answer within {self.timeout_s:g} s"
            except httpx2.RequestError as error:
                trouble = _reason(error)
            else:
                if response.status_code == 200:
                    return answer_of(response)
                trouble = f"status {response.status_code}: {complaint_of(response)}"
                if response.status_code in FATAL:
                    raise ValueError(f"endpoint {self.url} gives {trouble}")
                if response.status_code not in PASSING and response.status_code < 500:
                    raise RefusedError(response.status_code, complaint_of(response))
                wait_s = retry_after_s(response)
            if backoff_s is None or wait_s > self.timeout_s:
                break
            await asyncio.sleep(max(backoff_s, wait_s))
        raise SilentError(trouble)

    @property
    def _base(self) -> str:
        return self.url.rstrip("/")

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def _backoffs_s(retries: int) -> Iterator[float]:
    """Exponential backoff with jitter, so that requests that failed together are not retried together."""
    for retry in range(retries):
        yield min(BACKOFF_S * 2 ** min(retry, 30), MOST_BACKOFF_S) * random.uniform(0.5, 1.0)


def _reason(error: httpx2.RequestError) -> str:
    return str(error).strip() or type(error).__name__

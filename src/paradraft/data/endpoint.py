"""Answers from an OpenAI-compatible endpoint, such as vLLM's: bounded concurrency, retries.

`/completions` continues a text, `/chat/completions` answers a conversation through the server's chat template.
Servers differ in their errors and in what they list; what is read here is what vLLM, SGLang, llama.cpp and OpenAI
have in common.
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
"""Fields that are set here, or would give other answers than are read here."""


class RefusedError(Exception):
    """The server will not answer this, however often it is asked.

    Args:
        status: of the response.
        reason: the server's words.
    """

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
    """Path and body of the request for one turn.

    Temperature and top-p are always sent. Top-k and min-p, which not every server knows, are sent if
    they change something; the variables of the chat template, if there are any and it is used.
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
    """The answer in a response with status 200.

    Raises:
        RefusedError: there is none, or something else than the model or the limit ended it.
        ValueError: the server takes the reasoning out of the text, so that training would not see it.
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
    """The names in a list of models; None if it is none."""
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None


def complaint_of(response: httpx2.Response) -> str:
    """What the server says about an error, in a line.

    >>> complaint_of(httpx2.Response(400, json={"error": {"message": "too long"}}))
    'too long'
    """
    try:
        body = response.json()
        error = body.get("error", body)
        words = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        words = None
    return _short(str(words or response.text or response.reason_phrase))


def retry_after_s(response: httpx2.Response) -> float:
    """How many seconds the server asks to wait; 0 if it asks for nothing.

    Source: RFC 9110, section 10.2.3: a number of seconds or a date.

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
    return max(0.0, seconds)  # in this order, what is not a number becomes 0 too


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 200 else f"{words[:200]} …"


BACKOFF_S, MOST_BACKOFF_S = 1.0, 60.0
"""The wait before the first retry, doubled before each further one, and its limit."""
CONNECT_S = 20.0
FEWEST_IN_A_ROW = 8
"""How many questions in a row may stay without an answer, if fewer are asked at a time."""
PASSING = frozenset({408, 409, 425, 429})
"""Besides 5xx, the statuses that another try may not get."""
FATAL = frozenset({401, 402, 404, 405})
"""What every question would get: no key, no money, no such model or address."""
TOO_LONG = frozenset({400, 413, 422})
"""What servers say to a conversation that has grown beyond the model's room."""
SENT = ("temperature", "top_k", "top_p", "min_p", "seed")
"""The settings of `Sampling` that requests have."""


class SilentError(Exception):
    """The endpoint did not answer; another time it may."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Asks `/chat/completions` for conversations and `/completions` for prompts.

    Args:
        url: up to and with the version, such as "http://localhost:8000/v1".
        model: the name that the endpoint knows it by.
        sampling: temperature, top-k, top-p, min-p and seed; each turn gets a seed of its own.
        max_new_tokens: of a turn.
        concurrency: most requests at a time.
        retries: how often a request is sent again after an error that may pass.
        timeout_s: most seconds of a request.
        api_key: sent as a bearer token.
        fields: further fields of every request, such as a server's own sampling settings.
        chat_template_kwargs: variables of the server's chat template, sent with conversations.

    Raises:
        ValueError: a value is out of range.
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
        """What decides the text of the answers; the address does not, a server may move."""
        sampling = {name: getattr(self.sampling, name) for name in SENT}
        return {
            "model": self.model,
            "max_new_tokens": self.max_new_tokens,
            # Answers of former versions have no such setting, which counts as None.
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
        # Behind a colon some servers take the name of an adapter, which they do not list.
        if not {self.model, self.model.partition(":")[0]} & set(known):
            raise ValueError(f"endpoint {self.url} has no model {self.model!r}: it has {', '.join(known) or 'none'}")

    def answer(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        """Asks for all of them; an outcome is taken as soon as it is there.

        When many questions in a row stay without an answer, the endpoint is taken to be down and the
        others are not asked.

        Raises:
            ValueError: the endpoint says what it would say to every question.
        """
        asyncio.run(self._answer_all(questions, take))

    async def _answer_all(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        most_in_a_row = max(self.concurrency, FEWEST_IN_A_ROW)
        in_a_row = 0
        left = iter(questions)

        async def work(client: httpx2.AsyncClient) -> None:
            nonlocal in_a_row
            while in_a_row < most_in_a_row and (question := next(left, None)) is not None:
                try:
                    outcome = await self._outcome(client, question)
                    in_a_row = 0
                except SilentError as error:
                    outcome = Outcome(question=question, failure=str(error))
                    in_a_row += 1
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
        """One turn; `RefusedError` and `SilentError` say that there is none."""
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
    """Longer and longer waits, each with its own luck, so that requests that failed together do not return together."""
    for number in range(retries):
        yield min(BACKOFF_S * 2 ** min(number, 30), MOST_BACKOFF_S) * random.uniform(0.5, 1.0)


def _reason(error: httpx2.RequestError) -> str:
    return str(error).strip() or type(error).__name__

"""The OpenAI-compatible protocol: what is sent for one turn, and what the responses say.

`/completions` continues a text, `/chat/completions` answers a conversation through the server's chat
template. Servers differ in their errors and in what they list; what is read here is what vLLM,
SGLang, llama.cpp and OpenAI have in common.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from paradraft.core import Sampling
from paradraft.train.questions import EOS, LENGTH, Answer
from paradraft.train.record import Message

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

"""Answers of an OpenAI-compatible endpoint, such as vLLM's.

`/completions` continues a text, `/chat/completions` answers a conversation through the server's chat template.
Only the fields that vLLM, SGLang, llama.cpp and OpenAI have in common are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from paradraft.client.openai_client import OpenAIClient, RefusedError, SilentError, shortened
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
        raise RefusedError(response.status_code, f"not a completion: {shortened(response.text)}") from None
    if reasoning:
        raise ValueError("the endpoint takes the reasoning out of its answers: start it without a reasoning parser")
    if reason not in REASONS or not isinstance(text, str):
        raise RefusedError(response.status_code, f"no whole text: finish_reason={reason!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError(response.status_code, "the text has half a character in it") from None
    return Answer(text=text, finish_reason=REASONS[reason], tokens=tokens)


FEWEST_IN_A_ROW = 8
"""Failures in a row after which the endpoint counts as down, if `concurrency` is smaller."""
TOO_LONG = frozenset({400, 413, 422})
"""Statuses for a conversation that exceeds the context length."""
SENT = ("temperature", "top_k", "top_p", "min_p", "seed")
"""The settings of `Sampling` that are sent."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(OpenAIClient):
    """Sends conversations to `/chat/completions` and prompts to `/completions`.

    Args:
        sampling: temperature, top-k, top-p, min-p and seed; the seed of each turn is derived from it.
        concurrency: most requests at a time.
        fields: further fields of every request, such as sampling settings that only this server has.
        chat_template_kwargs: variables of the server's chat template, sent with conversations.
    """

    sampling: Sampling
    max_new_tokens: int
    concurrency: int = 32
    retries: int = 5
    fields: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self.check_model()

    def answer(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        """Answers all questions and passes each outcome to `take` at once.

        After many failures in a row the endpoint counts as down, and the remaining questions are not sent.

        Raises:
            ValueError: an error that every request would get.
        """
        most_failures = max(self.concurrency, FEWEST_IN_A_ROW)
        failures = 0
        remaining = iter(questions)

        async def work(http: httpx2.AsyncClient) -> None:
            nonlocal failures
            while failures < most_failures and (question := next(remaining, None)) is not None:
                try:
                    outcome = await self._outcome(http, question)
                    failures = 0
                except SilentError as error:
                    outcome = Outcome(question=question, failure=str(error))
                    failures += 1
                take(outcome)

        self.run(work, min(self.concurrency, len(questions)))

    async def _outcome(self, http: httpx2.AsyncClient, question: Question) -> Outcome:
        answers: list[Answer] = []
        while (prompt := next_prompt(question, answers)) is not None:
            try:
                answers.append(await self._ask(http, prompt, question.seed(self.sampling.seed, len(answers))))
            except RefusedError as error:
                if not (answers and error.status in TOO_LONG):
                    return Outcome(question=question, failure=str(error))
                break
        return Outcome(question=question, answers=tuple(answers))

    async def _ask(self, http: httpx2.AsyncClient, prompt: str | list[Message], seed: int) -> Answer:
        """Answers one turn; raises `RefusedError` or `SilentError` if there is no answer."""
        path, body = request_of(
            prompt, model=self.model, sampling=self.sampling, seed=seed, max_new_tokens=self.max_new_tokens,
            fields=self.fields, chat_template_kwargs=self.chat_template_kwargs,
        )  # fmt: skip
        return answer_of(await self.post(http, path, body, self.retries))

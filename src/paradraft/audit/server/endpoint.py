"""Asks an OpenAI-compatible server, and keeps what an audit judges: tokens, how likely the server says they were, and
which of them came together.

Answers are streamed: engines that draft send one chunk for each pass of the target, with the drafted tokens that were
accepted, and one more. Ids of tokens are asked for under vLLM's names. Servers that do not tell them name tokens by
their texts; an answer is then read up to the first token whose text is that of several, which stands for all of those.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from paradraft.data.endpoint import CONNECT_S, complaint_of
from paradraft.data.endpoint import Endpoint as CheckedEndpoint
from paradraft.errors import one_line
from paradraft.sampling_params import GREEDY
from paradraft.text.chat_template import Message
from paradraft.text.tokenization import REPLACEMENT
from paradraft.text.vocabulary import used_rows

EXTENSIONS: tuple[Mapping[str, object], ...] = (
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    {},
)
"""What is asked beyond OpenAI's parameters, the first that a server takes: ids, and none of the settings that a model's
generation config may bring along."""
WORD = "▁"
"""What some tokenizers write for the space before a word."""
BY_ID = "token_id:"
"""What tokens are called that are named by their ids."""
MOST_LIKELIEST = (20, 5, 1)
"""Of how many tokens probabilities are asked for at most, the first that a server takes."""
MOST_LOGPROB = 0.01
"""Logarithms of probabilities are at most 0; so much more is rounding."""
CONCURRENCY = 4
UNKNOWN = (400, 422)
"""The statuses of a server that does not know a parameter."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a server is asked.

    Args:
        number: of the prompt, from 1.
        prompt: a text to go on with, token ids, or a conversation.
        max_new_tokens: most tokens of the answer.
        temperature: 0 for the likeliest tokens.
        seed: of the random numbers.
        likeliest: of how many tokens the probabilities are asked for at each place.
    """

    number: int
    prompt: str | list[int] | list[Message]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    likeliest: int = 5

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)

    @property
    def body(self) -> dict[str, Any]:
        """What of it all servers know."""
        asked: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            return asked | {"messages": self.prompt, "logprobs": True, "top_logprobs": self.likeliest}
        return asked | {"prompt": self.prompt, "logprobs": self.likeliest}


@dataclass(frozen=True, kw_only=True)
class Served:
    """One answer of a server, of N tokens.

    Args:
        question: that it answers.
        tokens: their ids, that of an end among them.
        logprobs: the natural logarithm of the probability of each, as the server says; None where it does not.
        likeliest: at each place, the likeliest tokens with the same.
        steps: how many tokens came with each chunk.
        has_ended: whether the model ended the answer.
        is_named: whether it tells names of tokens, not their ids.
        is_cut: whether the last of the tokens stands for any of those whose names are those of several.
        read: the ids of the prompt, as the server read them; None if it does not say.
        prompt_tokens: how many there were of these; None if it does not say.
    """

    question: Question
    tokens: list[int]
    logprobs: list[float | None]
    likeliest: list[dict[int, float]]
    steps: list[int]
    has_ended: bool
    is_named: bool
    is_cut: bool
    read: list[int] | None
    prompt_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server that is asked.

    Args:
        url: up to and with the version, such as "http://localhost:8000/v1".
        model: the name that it knows the model by.
        tokenizer: the model's.
        end_ids: the tokens that end the model's texts.
        rows: of the model's output head; those that are no token have no text either.
        api_key: sent as a bearer token.
        timeout_s: most seconds of an answer.
    """

    url: str
    model: str
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    end_ids: frozenset[int]
    rows: int = 0
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    @cached_property
    def forms(self) -> list[tuple[Mapping[str, object], int]]:
        """Ways to ask that it has not refused yet: what is asked beyond OpenAI's parameters, and most likeliest."""
        return [(extension, most) for most in MOST_LIKELIEST for extension in EXTENSIONS]

    @cached_property
    def ids_of(self) -> Mapping[str, list[int]]:
        """The tokens by their texts, for servers that do not tell ids.

        Servers write a space before the word of a token that begins one, or leave it out.
        """
        found: dict[str, list[int]] = {}
        for token in sorted(self.tokenizer.get_vocab().values()):
            piece = str(self.tokenizer.convert_ids_to_tokens(token))
            text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
            for form in {text, piece.replace(WORD, " ") if piece.startswith(WORD) else text}:
                found.setdefault(form, []).append(token)
        return found

    @cached_property
    def nameless(self) -> frozenset[int]:
        """The tokens whose text is that of others too, or none, such as those of a part of a character."""
        added = self.tokenizer.added_tokens_decoder
        silent = {token for token in added if added[token].special and token not in self.end_ids}
        return (
            frozenset(silent)
            | frozenset(range(used_rows(self.tokenizer), self.rows))
            | {token for name, ids in self.ids_of.items() if len(ids) > 1 or is_unreadable(name) for token in ids}
        )

    def check(self) -> None:
        """Raises ValueError if it cannot be reached, or does not know the model."""
        asked = CheckedEndpoint(url=self.url, model=self.model, sampling=GREEDY, max_new_tokens=1, api_key=self.api_key)
        asked.check([])

    def answers(
        self, questions: Sequence[Question], report: Callable[[int], None], concurrency: int = CONCURRENCY
    ) -> list[Served]:
        """Asks for all of them.

        Args:
            questions: are asked in order.
            report: told how many are answered.
            concurrency: how many at a time.

        Raises:
            ValueError: the server refuses a question, does not answer it, or gives no probabilities.
        """
        return asyncio.run(self._answers(questions, report, concurrency))

    async def _answers(
        self, questions: Sequence[Question], report: Callable[[int], None], concurrency: int
    ) -> list[Served]:
        found: dict[int, Served] = {}
        left = iter(enumerate(questions))
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        is_safe = self.url.startswith("https")  # without, certificates would be read for each client all the same
        async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=timeout, verify=is_safe) as client:
            reader = _Reader(self, client)

            async def work() -> None:
                for index, question in left:
                    found[index] = await reader.answer(question)
                    report(len(found))

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(concurrency, len(questions))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [found[index] for index in range(len(questions))]


def is_unreadable(name: str) -> bool:
    """Whether a text does not tell which token it is of: none at all, or a part of a character."""
    return not name or REPLACEMENT in name


class _Reader:
    """Asks by one client."""

    def __init__(self, endpoint: Endpoint, client: httpx2.AsyncClient) -> None:
        self._endpoint, self._client = endpoint, client

    async def answer(self, question: Question) -> Served:
        endpoint, last = self._endpoint, self._endpoint.forms[-1]
        path = "/chat/completions" if question.is_chat else "/completions"
        try:
            async with asyncio.timeout(endpoint.timeout_s):
                while True:
                    form = extension, most = endpoint.forms[0]
                    asked = replace(question, likeliest=min(question.likeliest, most))
                    body = {"model": endpoint.model, **asked.body, **extension}
                    stream = self._client.stream("POST", f"{endpoint.url.rstrip('/')}{path}", json=body)
                    async with stream as response:
                        if response.status_code == 200:
                            return self._served(question, [event async for event in _events(response)])
                        await response.aread()
                    if response.status_code not in UNKNOWN or form is last:
                        told = f"status {response.status_code}: {complaint_of(response)}"
                        raise ValueError(f"endpoint {endpoint.url} gives {told}")
                    if endpoint.forms[0] is form:  # another question may have found out already
                        endpoint.forms.pop(0)
        except TimeoutError:
            told = f"endpoint {endpoint.url} has not answered prompt {question.number} within {endpoint.timeout_s:g} s"
            raise ValueError(told) from None
        except httpx2.HTTPError as error:
            told = str(error).strip() or type(error).__name__
            raise ValueError(f"endpoint {endpoint.url} broke off at prompt {question.number}: {told}") from None

    def _served(self, question: Question, events: Sequence[dict[str, Any]]) -> Served:
        """An answer, from the events of its stream."""
        entries: list[_Entry] = []
        steps: list[int] = []
        read = prompt_tokens = reason = None
        for event in events:
            try:
                if isinstance(usage := event.get("usage"), dict):
                    prompt_tokens = _number(usage.get("prompt_tokens"), prompt_tokens)
                read = _numbers(event.get("prompt_token_ids"), read)
                for choice in event.get("choices") or ():
                    read = _numbers(choice.get("prompt_token_ids"), read)
                    reason = choice.get("finish_reason") or reason
                    new = self._entries(choice)
                    entries += new
                    steps += [len(new)] if new else []
            except (KeyError, TypeError, AttributeError, _UnreadableError):
                raise ValueError(
                    f"endpoint {self._endpoint.url} gives logprobs that cannot be read: {one_line(event)}"
                ) from None
        if reason not in ("stop", "length"):
            raise ValueError(
                f"endpoint {self._endpoint.url} does not end its answer to prompt {question.number} "
                f"(finish_reason {one_line(reason)})"
            )
        ends, has_ended = self._endpoint.end_ids, reason == "stop"
        if (
            has_ended and ends and entries and entries[-1].name == "" and entries[-1].token is None
        ):  # some servers write the end as no text
            entries[-1] = replace(entries[-1], token=min(ends))
        elif has_ended and ends and not (entries and entries[-1].token in ends):  # and some not at all
            entries.append(_Entry(name="", token=min(ends), logprob=None, likeliest={}, is_named=False))
            steps = [*steps[:-1], steps[-1] + 1] if steps else [1]
        number = next((place for place, entry in enumerate(entries) if entry.token is None), len(entries))
        if is_cut := number < len(entries):
            cut = replace(entries[number], token=self._nameless(entries[number].name), logprob=None, likeliest={})
            entries, steps = [*entries[:number], cut], []
        return Served(
            question=question, tokens=[entry.token for entry in entries if entry.token is not None],
            logprobs=[entry.logprob for entry in entries], likeliest=[entry.likeliest for entry in entries],
            steps=steps, has_ended=has_ended and not is_cut, is_named=any(entry.is_named for entry in entries),
            is_cut=is_cut, read=read, prompt_tokens=prompt_tokens,
        )  # fmt: skip

    def _entries(self, choice: Mapping[str, Any]) -> list[_Entry]:
        """The tokens of a chunk."""
        told, ids = choice.get("logprobs"), choice.get("token_ids")
        rows = _rows(told) if told else []
        if not rows:
            if ids or choice.get("text") or (choice.get("delta") or {}).get("content"):
                raise ValueError(
                    f"endpoint {self._endpoint.url} gives no logprobs, and without them ties cannot be told from "
                    "faults: let the server give them"
                )
            return []
        if ids is not None and len(ids) != len(rows):
            raise _UnreadableError
        return [
            _Entry(
                name=name,
                token=self._id(name, known if ids is None else ids[place]),
                logprob=_logprob(logprob),
                likeliest={
                    token: _logprob(value)
                    for other, key, value in best
                    if (token := self._id(other, key)) is not None and value is not None  # llama.cpp's -inf
                },
                is_named=ids is None and known is None and not name.startswith(BY_ID),
            )
            for place, (name, known, logprob, best) in enumerate(rows)
        ]

    def _nameless(self, name: str) -> int:
        """A token that stands for all of those that a name does not tell apart."""
        nameless = self._endpoint.nameless
        if nameless and (is_unreadable(name) or name in self._endpoint.ids_of):
            return min(nameless)
        raise ValueError(
            f"endpoint {self._endpoint.url} names a token {one_line(name)}, which the tokenizer of the target does not "
            "have: is it the same model (--target)?"
        )

    def _id(self, name: str, known: int | None) -> int | None:
        """The id of a token; None if its text is that of several, or of none."""
        if known is not None:
            return _token(known)
        if name.startswith(BY_ID):
            return _token(name.removeprefix(BY_ID))
        ids = self._endpoint.ids_of.get(name, [])
        return ids[0] if len(ids) == 1 and ids[0] not in self._endpoint.nameless else None


class _UnreadableError(Exception):
    """What a server tells is not what it should be."""


def _token(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise _UnreadableError from None


def _logprob(value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise _UnreadableError from None
    if math.isnan(found) or found > MOST_LOGPROB:
        raise _UnreadableError
    return found


def _number(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise


def _numbers(value: Any, otherwise: list[int] | None) -> list[int] | None:
    is_read = isinstance(value, list) and bool(value) and all(isinstance(token, int) for token in value)
    return value if is_read else otherwise


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A token, as a chunk tells it; `token` is None if its name does not say which it is."""

    name: str
    token: int | None
    logprob: float | None
    likeliest: dict[int, float]
    is_named: bool


def _rows(told: Any) -> list[tuple[str, int | None, float, list[tuple[str, int | None, float]]]]:
    """Name, id, logarithm, and the same of the likeliest tokens, of each token of a chunk, in either of the forms."""
    if "content" in told:
        return [
            (
                entry["token"],
                entry.get("id"),
                entry["logprob"],
                [(each["token"], each.get("id"), each["logprob"]) for each in entry.get("top_logprobs") or ()],
            )
            for entry in told["content"] or ()
        ]
    best = told.get("top_logprobs") or [None] * len(told["tokens"])
    if not len(told["tokens"]) == len(told["token_logprobs"]) == len(best):
        raise _UnreadableError
    return [
        (name, None, logprob, [(other, None, value) for other, value in (likeliest or {}).items()])
        for name, logprob, likeliest in zip(told["tokens"], told["token_logprobs"], best, strict=True)
    ]


async def _events(response: httpx2.Response) -> Any:
    """The objects of a stream."""
    is_told = False
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
        is_told = True
        yield event
    if not is_told:
        raise ValueError(f"{response.url}: the answer is no stream of events: is it OpenAI-compatible?")

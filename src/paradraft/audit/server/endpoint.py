"""A client of OpenAI-compatible servers that keeps tokens, their log-probabilities, and the chunks they came in.

Answers are streamed: engines that draft send one chunk per pass of the target, with the accepted drafted tokens and one
more. Token ids are requested by vLLM's parameters. Servers without these name tokens by their texts; an answer is then
read up to the first token whose text several tokens share, which represents all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from paradraft.audit.server.logprobs import UnreadableError, logprob_of, rows_of, token_of
from paradraft.client.openai_client import OpenAIClient, complaint_of, events_of, reason_of
from paradraft.errors import one_line
from paradraft.text.chat_template import Message
from paradraft.text.tokenization import REPLACEMENT
from paradraft.text.vocabulary import used_rows

EXTENSIONS: tuple[Mapping[str, object], ...] = (
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    {},
)
"""Parameters beyond OpenAI's; the first that a server accepts are used. They request token ids, and switch off settings
of a model's generation config."""
WORD = "▁"
"""The space before a word, as some tokenizers write it."""
BY_ID = "token_id:"
"""Prefix of the names of tokens that are named by their ids."""
MOST_LIKELIEST = (20, 5, 1)
"""Values of `top_logprobs`, of which the first that a server accepts is used."""
CONCURRENCY = 4
UNKNOWN = (400, 422)
"""Statuses by which servers refuse a parameter."""


@dataclass(frozen=True, kw_only=True)
class ServerPrompt:
    """One request to a server.

    Args:
        number: of the prompt, from 1.
        prompt: a text or token ids to continue, or a conversation.
        likeliest: tokens per position whose log-probabilities are requested (`top_logprobs`).
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
        """The parameters that all servers know."""
        parameters: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            return parameters | {"messages": self.prompt, "logprobs": True, "top_logprobs": self.likeliest}
        return parameters | {"prompt": self.prompt, "logprobs": self.likeliest}


@dataclass(frozen=True, kw_only=True)
class Served:
    """One answer of a server, of N tokens.

    Args:
        tokens: ids, an end-of-sequence token included.
        logprobs: natural logarithm of the probability of each, by the server; None where it gives none.
        likeliest: at each position, the likeliest tokens with their log-probabilities.
        steps: how many tokens came with each chunk.
        is_named: whether the server gives names of tokens, not their ids.
        is_cut: whether the last token represents all tokens with ambiguous names.
        read: the ids of the prompt, as the server read them; None if it does not say.
        prompt_tokens: how many ids the server read; None if it does not say.
    """

    question: ServerPrompt
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
class AuditedServer(OpenAIClient):
    """The server that is audited, or the reference server.

    Args:
        rows: of the model's output head; padding rows have no text.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    end_ids: frozenset[int]
    rows: int = 0

    @cached_property
    def forms(self) -> list[tuple[Mapping[str, object], int]]:
        """Forms of a request not refused yet: parameters beyond OpenAI's, and most `top_logprobs`."""
        return [(extension, most) for most in MOST_LIKELIEST for extension in EXTENSIONS]

    @cached_property
    def ids_of(self) -> Mapping[str, list[int]]:
        """The tokens by their texts, for servers that give no ids.

        Servers write a space before the word of a token that begins one, or leave it out.
        """
        ids: dict[str, list[int]] = {}
        for token in sorted(self.tokenizer.get_vocab().values()):
            piece = str(self.tokenizer.convert_ids_to_tokens(token))
            text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
            for form in {text, piece.replace(WORD, " ") if piece.startswith(WORD) else text}:
                ids.setdefault(form, []).append(token)
        return ids

    @cached_property
    def ambiguous(self) -> frozenset[int]:
        """Tokens without a text of theirs alone: those that share it, or have none, such as a part of a character."""
        added = self.tokenizer.added_tokens_decoder
        silent = {token for token in added if added[token].special and token not in self.end_ids}
        return (
            frozenset(silent)
            | frozenset(range(used_rows(self.tokenizer), self.rows))
            | {token for name, ids in self.ids_of.items() if len(ids) > 1 or is_unreadable(name) for token in ids}
        )

    def answers(
        self, questions: Sequence[ServerPrompt], report: Callable[[int], None], concurrency: int = CONCURRENCY
    ) -> list[Served]:
        """Sends all questions, and returns their answers in the same order.

        Args:
            report: receives the number of answers so far.

        Raises:
            ValueError: the server refuses a question, does not answer it, or gives no probabilities.
        """
        served: dict[int, Served] = {}
        remaining = iter(enumerate(questions))

        async def work(http: httpx2.AsyncClient) -> None:
            for index, question in remaining:
                served[index] = await _Reader(self, http).answer(question)
                report(len(served))

        self.run(work, min(concurrency, len(questions)))
        return [served[index] for index in range(len(questions))]


def is_unreadable(name: str) -> bool:
    """Whether a text identifies no token: it is empty, or a part of a character."""
    return not name or REPLACEMENT in name


class _Reader:
    """Sends questions by one client, and reads the streams of answers."""

    def __init__(self, endpoint: AuditedServer, client: httpx2.AsyncClient) -> None:
        self._endpoint, self._client = endpoint, client

    async def answer(self, question: ServerPrompt) -> Served:
        endpoint, last = self._endpoint, self._endpoint.forms[-1]
        path = "/chat/completions" if question.is_chat else "/completions"
        try:
            async with asyncio.timeout(endpoint.timeout_s):
                while True:
                    form = extension, most = endpoint.forms[0]
                    limited = replace(question, likeliest=min(question.likeliest, most))
                    body = {"model": endpoint.model, **limited.body, **extension}
                    stream = self._client.stream("POST", endpoint.address(path), json=body)
                    async with stream as response:
                        if response.status_code == 200:
                            return self._served(question, [event async for event in events_of(response)])
                        await response.aread()
                    if response.status_code not in UNKNOWN or form is last:
                        raise ValueError(f"endpoint {endpoint.url} gives {complaint_of(response)}")
                    if endpoint.forms[0] is form:  # unless another question has removed it already
                        endpoint.forms.pop(0)
        except TimeoutError:
            message = (
                f"endpoint {endpoint.url} has not answered prompt {question.number} within {endpoint.timeout_s:g} s"
            )
            raise ValueError(message) from None
        except httpx2.HTTPError as error:
            raise ValueError(
                f"endpoint {endpoint.url} broke off at prompt {question.number}: {reason_of(error)}"
            ) from None

    def _served(self, question: ServerPrompt, events: Sequence[dict[str, Any]]) -> Served:
        entries: list[_Entry] = []
        steps: list[int] = []
        read = prompt_tokens = reason = None
        for event in events:
            try:
                if isinstance(usage := event.get("usage"), dict):
                    prompt_tokens = _integer(usage.get("prompt_tokens"), prompt_tokens)
                read = _ids(event.get("prompt_token_ids"), read)
                for choice in event.get("choices") or ():
                    read = _ids(choice.get("prompt_token_ids"), read)
                    reason = choice.get("finish_reason") or reason
                    new = self._entries(choice)
                    entries += new
                    steps += [len(new)] if new else []
            except (KeyError, TypeError, AttributeError, UnreadableError):
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
        known = next((index for index, entry in enumerate(entries) if entry.token is None), len(entries))
        if is_cut := known < len(entries):
            cut = replace(entries[known], token=self._ambiguous(entries[known].name), logprob=None, likeliest={})
            entries, steps = [*entries[:known], cut], []
        return Served(
            question=question, tokens=[entry.token for entry in entries if entry.token is not None],
            logprobs=[entry.logprob for entry in entries], likeliest=[entry.likeliest for entry in entries],
            steps=steps, has_ended=has_ended and not is_cut, is_named=any(entry.is_named for entry in entries),
            is_cut=is_cut, read=read, prompt_tokens=prompt_tokens,
        )  # fmt: skip

    def _entries(self, choice: Mapping[str, Any]) -> list[_Entry]:
        """The tokens of a chunk."""
        logprobs, ids = choice.get("logprobs"), choice.get("token_ids")
        rows = rows_of(logprobs) if logprobs else []
        if not rows:
            if ids or choice.get("text") or (choice.get("delta") or {}).get("content"):
                raise ValueError(
                    f"endpoint {self._endpoint.url} gives no logprobs, and without them ties cannot be told from "
                    "faults: let the server give them"
                )
            return []
        if ids is not None and len(ids) != len(rows):
            raise UnreadableError
        return [
            _Entry(
                name=name,
                token=self._id(name, known if ids is None else ids[index]),
                logprob=logprob_of(logprob),
                likeliest={
                    token: logprob_of(value)
                    for other, key, value in best
                    if (token := self._id(other, key)) is not None and value is not None  # llama.cpp's -inf
                },
                is_named=ids is None and known is None and not name.startswith(BY_ID),
            )
            for index, (name, known, logprob, best) in enumerate(rows)
        ]

    def _ambiguous(self, name: str) -> int:
        """The token that represents all tokens with ambiguous names."""
        ambiguous = self._endpoint.ambiguous
        if ambiguous and (is_unreadable(name) or name in self._endpoint.ids_of):
            return min(ambiguous)
        raise ValueError(
            f"endpoint {self._endpoint.url} names a token {one_line(name)}, which the tokenizer of the target does not "
            "have: is it the same model (--target)?"
        )

    def _id(self, name: str, known: int | None) -> int | None:
        """The id of a token; None if several share its text, or none has it."""
        if known is not None:
            return token_of(known)
        if name.startswith(BY_ID):
            return token_of(name.removeprefix(BY_ID))
        ids = self._endpoint.ids_of.get(name, [])
        return ids[0] if len(ids) == 1 and ids[0] not in self._endpoint.ambiguous else None


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A token of a chunk; `token` is None if its name does not identify it."""

    name: str
    token: int | None
    logprob: float | None
    likeliest: dict[int, float]
    is_named: bool


def _integer(value: Any, default: int | None) -> int | None:
    return value if isinstance(value, int) else default


def _ids(value: Any, default: list[int] | None) -> list[int] | None:
    is_ids = isinstance(value, list) and bool(value) and all(isinstance(token, int) for token in value)
    return value if is_ids else default

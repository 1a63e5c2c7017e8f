"""Response bodies and stream events, shared by completions and chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paradraft.engine.engine import Chunk, Engine
from paradraft.serve.answers import REASONS
from paradraft.serve.questions import Choice
from paradraft.serve.schemas import ApiRequest
from paradraft.serve.shown_tokens import ShownToken


class Form(Protocol):
    """Differences between completions and chat completions."""

    @property
    def schema(self) -> type[ApiRequest]:
        """Pydantic model of the request."""

    prompts_name: str
    """Name of the request's prompt parameter."""
    id_prefix: str
    whole_name: str
    """`object` of a response."""
    piece_name: str
    """`object` of a stream event."""
    has_one_prompt: bool
    """Whether all answers of a request are to the same prompt."""

    def prompts(self, request: Any) -> list[object]:
        """Prompts of a request, not validated yet; raises ValueError if there is none."""

    def tokens(self, prompt: Any, request: Any, engine: Engine) -> list[int]:
        """Token ids of a prompt; raises ValueError if it is no prompt."""

    def whole(self, text: str) -> dict[str, Any]:
        """Fields of a choice for a whole answer's text."""

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Fields of a choice for the text of a stream event."""

    def logprobs(self, tokens: Sequence[ShownToken], begin: int) -> dict[str, Any]:
        """Field `logprobs` of a choice; the first token begins at character `begin` of the answer."""


@dataclass
class AnswerProgress:
    """An answer while it is decoded; `shown` holds its tokens with log probabilities, if requested."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    shown: list[ShownToken] | None = None
    finish_reason: str | None = None

    def add(self, chunk: Chunk, shown: Sequence[ShownToken] | None) -> None:
        """Appends a chunk."""
        if shown is not None:
            self.shown = self.shown or []
            self.shown += shown
        self.tokens += chunk.tokens
        self.texts.append(chunk.text)
        if chunk.finish_reason is not None:
            self.finish_reason = REASONS[chunk.finish_reason]


def usage(prompts: Sequence[list[int]], answers: Sequence[AnswerProgress]) -> dict[str, int]:
    """Token counts; a prompt counts once, even with `n` answers."""
    prompt, completion = sum(map(len, prompts)), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def whole(
    form: Form,
    envelope: Mapping[str, Any],
    choices: Sequence[Choice],
    answers: Sequence[AnswerProgress],
    used: Mapping[str, int],
    request: ApiRequest,
) -> dict[str, Any]:
    """Body of a response without streaming."""
    choices_json = [
        {
            "index": choice.index,
            **form.whole("".join(answer.texts)),
            "logprobs": None if answer.shown is None else form.logprobs(answer.shown, 0),
            "finish_reason": answer.finish_reason,
        }
        for choice, answer in zip(choices, answers, strict=True)
    ]
    body = {**envelope, "object": form.whole_name, "choices": choices_json, "usage": used}
    if request.return_token_ids:
        for choice, answer in zip(choices, answers, strict=True):
            _add_ids(form, body, choice.index, answer.tokens, choice.tokens)
    return body


def _add_ids(form: Form, body: dict[str, Any], index: int, tokens: list[int], prompt: list[int] | None) -> None:
    """Adds token ids to a body under vLLM's keys."""
    choice = body["choices"][index]
    choice["token_ids"] = tokens
    if prompt is not None:
        (body if form.has_one_prompt else choice)["prompt_token_ids"] = prompt


def piece(
    form: Form, envelope: Mapping[str, Any], choice: Choice, chunk: Chunk, answer: AnswerProgress, request: ApiRequest
) -> dict[str, Any]:
    """Stream event for a chunk that `answer` already contains."""
    logprobs = None
    if answer.shown is not None:
        previous, new = answer.shown[: -len(chunk.tokens)], answer.shown[-len(chunk.tokens) :]
        logprobs = form.logprobs(new, sum(len(each.text) for each in previous))
    choice_json = {
        "index": choice.index,
        **form.piece(chunk.text, is_first=len(answer.texts) == 1),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }
    data = {**envelope, "object": form.piece_name, "choices": [choice_json]}
    if request.return_token_ids:
        _add_ids(form, data, 0, chunk.tokens, choice.tokens if len(answer.texts) == 1 else None)
    if request.stream_options is not None and request.stream_options.include_usage:
        data["usage"] = None
    if request.paradraft:
        data["paradraft"] = {
            "drafted_text": chunk.drafted_text,
            "own_text": chunk.own_text,
            "accepted": chunk.accepted,
            "drafted": chunk.drafted,
            "tokens": len(chunk.tokens),
        }
    return data

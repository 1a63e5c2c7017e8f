"""How answers are written: as texts, or as messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paradraft.engine.engine import Chunk, Engine
from paradraft.serve.answers import REASONS
from paradraft.serve.questions import Choice
from paradraft.serve.schemas import Asked
from paradraft.serve.shown_tokens import ShownToken


class Form(Protocol):
    """What differs between the two kinds of requests."""

    @property
    def schema(self) -> type[Asked]:
        """What such a request may ask for."""

    prompts_name: str
    """The parameter that has the prompts."""
    id_prefix: str
    whole_name: str
    """What `object` says of an answer."""
    piece_name: str
    """What `object` says of a piece of one."""
    has_one_prompt: bool
    """Whether all answers of a request are to the same prompt."""

    def prompts(self, asked: Any) -> list[object]:
        """The prompts of a request, not yet looked at.

        Raises:
            ValueError: there is none.
        """

    def tokens(self, prompt: Any, asked: Any, engine: Engine) -> list[int]:
        """What the model reads of one of them.

        Raises:
            ValueError: it is not a prompt.
        """

    def whole(self, text: str) -> dict[str, Any]:
        """The text of a whole answer, as it stands in a choice."""

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The text of a piece, as it stands in a choice."""

    def logprobs(self, tokens: Sequence[ShownToken], begin: int) -> dict[str, Any]:
        """How likely tokens are, as it stands in a choice; the first begins at a place of the answer's text."""


@dataclass
class Answer:
    """An answer as it grows.

    Args:
        tokens: their ids.
        texts: its pieces.
        shown: its tokens with their probabilities, if these are asked for.
        finish_reason: why it has ended.
    """

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    shown: list[ShownToken] | None = None
    finish_reason: str | None = None

    def add(self, chunk: Chunk, shown: Sequence[ShownToken] | None) -> None:
        """Another piece."""
        if shown is not None:
            self.shown = self.shown or []
            self.shown += shown
        self.tokens += chunk.tokens
        self.texts.append(chunk.text)
        if chunk.finish_reason is not None:
            self.finish_reason = REASONS[chunk.finish_reason]


def usage(prompts: Sequence[list[int]], answers: Sequence[Answer]) -> dict[str, int]:
    """How many tokens were read and written; a prompt counts once, however many answers it has."""
    read, written = sum(map(len, prompts)), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def whole(
    form: Form,
    envelope: Mapping[str, Any],
    choices: Sequence[Choice],
    answers: Sequence[Answer],
    used: Mapping[str, int],
    asked: Asked,
) -> dict[str, Any]:
    """The body of a response that has all answers."""
    written = [
        {
            "index": choice.index,
            **form.whole("".join(answer.texts)),
            "logprobs": None if answer.shown is None else form.logprobs(answer.shown, 0),
            "finish_reason": answer.finish_reason,
        }
        for choice, answer in zip(choices, answers, strict=True)
    ]
    found = {**envelope, "object": form.whole_name, "choices": written, "usage": used}
    if asked.return_token_ids:
        for choice, answer in zip(choices, answers, strict=True):
            _tell_ids(form, found, choice.index, answer.tokens, choice.tokens)
    return found


def _tell_ids(form: Form, found: dict[str, Any], index: int, tokens: list[int], prompt: list[int] | None) -> None:
    """Puts the ids of tokens into a response where vLLM has them."""
    choice = found["choices"][index]
    choice["token_ids"] = tokens
    if prompt is not None:
        (found if form.has_one_prompt else choice)["prompt_token_ids"] = prompt


def piece(
    form: Form, envelope: Mapping[str, Any], choice: Choice, chunk: Chunk, answer: Answer, asked: Asked
) -> dict[str, Any]:
    """An event with what one round has added to an answer, which has it already."""
    logprobs = None
    if answer.shown is not None:
        before, new = answer.shown[: -len(chunk.tokens)], answer.shown[-len(chunk.tokens) :]
        logprobs = form.logprobs(new, sum(len(each.text) for each in before))
    written = {
        "index": choice.index,
        **form.piece(chunk.text, is_first=len(answer.texts) == 1),
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }
    found = {**envelope, "object": form.piece_name, "choices": [written]}
    if asked.return_token_ids:
        _tell_ids(form, found, 0, chunk.tokens, choice.tokens if len(answer.texts) == 1 else None)
    if asked.stream_options is not None and asked.stream_options.include_usage:
        found["usage"] = None
    if asked.paradraft:
        found["paradraft"] = {
            "drafted_text": chunk.drafted_text,
            "own_text": chunk.own_text,
            "accepted": chunk.accepted,
            "drafted": chunk.drafted,
            "tokens": len(chunk.tokens),
        }
    return found

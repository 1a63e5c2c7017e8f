"""`/v1/completions`: continues prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from pydantic import Field

from paradraft.decode.logprobs import TokenLogprobs
from paradraft.engine.engine import Engine
from paradraft.engine.request import MOST_LOGPROBS, rows_of
from paradraft.serve.json_schema import COUNT, NUMBER, STRING, list_of, object_of
from paradraft.serve.schemas import LEAST, ApiRequest


class CompletionRequest(ApiRequest):
    """Continue texts."""

    prompt: Any
    logprobs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": MOST_LOGPROBS})

    prompts_name: ClassVar = "prompt"
    id_prefix: ClassVar = "cmpl-"
    whole_name: ClassVar = "text_completion"
    piece_name: ClassVar = "text_completion"
    usual_limit: ClassVar = 16
    whole_schema: ClassVar = {"text": STRING}
    piece_schema: ClassVar = {"text": STRING}
    logprobs_schema: ClassVar = object_of(
        tokens=list_of(STRING),
        token_logprobs=list_of(NUMBER),
        top_logprobs=list_of({"type": "object", "additionalProperties": NUMBER}),
        text_offset=list_of(COUNT),
    )

    @property
    def most_logprobs(self) -> int | None:
        """See `ApiRequest`."""
        return self.logprobs

    def prompts(self) -> list[Any]:
        """See `ApiRequest`; a text or token ids, or several of these."""
        return rows_of(self.prompt)[0]

    def tokens(self, prompt: Any, engine: Engine) -> list[int]:
        """See `ApiRequest`; token ids are taken as they are."""
        return engine.prompt_tokens(prompt)

    def whole(self, text: str) -> dict[str, Any]:
        """See `ApiRequest`."""
        return {"text": text}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """See `ApiRequest`."""
        return {"text": text}

    def logprobs_json(
        self, tokens: Sequence[TokenLogprobs], shown: Callable[[int], tuple[str, str]], begin: int
    ) -> dict[str, Any]:
        """See `ApiRequest`; lists with an entry for each token."""
        names, texts = zip(*(shown(each.token) for each in tokens), strict=True)
        return {
            "tokens": [*names],
            "token_logprobs": [max(each.logprob, LEAST) for each in tokens],
            # Reversed, so that of tokens with the same name the likeliest stays.
            "top_logprobs": [
                {shown(token)[0]: max(logprob, LEAST) for token, logprob in reversed(each.likeliest)} for each in tokens
            ],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=begin)),
        }

"""`/v1/completions`: continues prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paradraft.engine.engine import Engine
from paradraft.engine.request import rows_of
from paradraft.serve.schemas import AskedText
from paradraft.serve.shown_tokens import ShownToken


class Completions:
    """Completion requests, see `forms.Form`."""

    schema = AskedText
    prompts_name = "prompt"
    id_prefix = "cmpl-"
    whole_name = piece_name = "text_completion"
    has_one_prompt = False

    def prompts(self, request: AskedText) -> list[object]:
        """See `Form`; a text or token ids, or several of these."""
        return rows_of(request.prompt)[0]

    def tokens(self, prompt: Any, request: AskedText, engine: Engine) -> list[int]:
        """See `Form`; token ids are taken as they are."""
        return engine.prompt_tokens(prompt)

    def whole(self, text: str) -> dict[str, Any]:
        """See `Form`."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[ShownToken], begin: int) -> dict[str, Any]:
        """See `Form`; lists with an entry for each token."""
        lengths = [len(token.text) for token in tokens]
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # Reversed, so that of tokens with the same name the likeliest stays.
            "top_logprobs": [
                dict(reversed([(each.name, each.logprob) for each in token.likeliest])) for token in tokens
            ],
            "text_offset": list(accumulate(lengths[:-1], initial=begin)),
        }

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """See `Form`."""
        return {"text": text}

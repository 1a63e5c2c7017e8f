"""`/v1/completions`: going on with texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paradraft.engine.engine import Engine
from paradraft.engine.request import rows_of
from paradraft.serve.schemas import AskedText
from paradraft.serve.shown_tokens import ShownToken


class Completions:
    """Requests for texts, see `forms.Form`."""

    schema = AskedText
    prompts_name = "prompt"
    id_prefix = "cmpl-"
    whole_name = piece_name = "text_completion"
    has_one_prompt = False

    def prompts(self, asked: AskedText) -> list[object]:
        """A text or token ids, or several of these."""
        return rows_of(asked.prompt)[0]

    def tokens(self, prompt: Any, asked: AskedText, engine: Engine) -> list[int]:
        """Token ids are taken as they are."""
        return engine.prompt_tokens(prompt)

    def whole(self, text: str) -> dict[str, Any]:
        """A text."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[ShownToken], begin: int) -> dict[str, Any]:
        """Lists with an entry for each token."""
        lengths = [len(token.text) for token in tokens]
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # Of several tokens with the same name the likeliest.
            "top_logprobs": [
                dict(reversed([(each.name, each.logprob) for each in token.likeliest])) for token in tokens
            ],
            "text_offset": list(accumulate(lengths[:-1], initial=begin)),
        }

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """A text."""
        return {"text": text}

"""`/v1/completions`: going on with texts."""

from __future__ import annotations

from typing import Any

from paradraft.engine import Engine
from paradraft.request import rows_of
from paradraft.serve.schemas import AskedText


class Completions:
    """Requests for texts, see `forms.Form`."""

    schema = AskedText
    prompts_name = "prompt"
    id_prefix = "cmpl-"
    whole_name = piece_name = "text_completion"

    def prompts(self, asked: AskedText) -> list[object]:
        """A text or token ids, or several of these."""
        return rows_of(asked.prompt)[0]

    def tokens(self, prompt: Any, asked: AskedText, engine: Engine) -> list[int]:
        """Token ids are taken as they are."""
        return engine.prompt_tokens(prompt)

    def whole(self, text: str) -> dict[str, Any]:
        """A text."""
        return {"text": text}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """A text."""
        return {"text": text}

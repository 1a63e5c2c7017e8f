"""Where the text of each row ends: at an end-of-sequence token or at the length limit.

The end may lie inside an accepted run. What comes after it is cut: neither emitted nor counted.
"""

from __future__ import annotations

from paradraft.core import ABSENT, Draft, Step, Verdict


class Stops:
    """Cuts what the rounds commit and remembers which rows have ended.

    Args:
        batch_size: B.
        eos_ids: tokens that end a row; the end token itself is emitted.
        max_new_tokens: most tokens a row may get.

    Raises:
        ValueError: `max_new_tokens` is below 1.
    """

    def __init__(self, *, batch_size: int, eos_ids: frozenset[int], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least 1")
        self.eos_ids = eos_ids
        self._left = [max_new_tokens] * batch_size

    @property
    def all_finished(self) -> bool:
        """Whether every row has ended."""
        return not any(self._left)

    @property
    def room(self) -> int:
        """Most tokens that any row may still get."""
        return max(self._left)

    def cut(self, draft: Draft, verdict: Verdict) -> Step:
        """The tokens of one round that are really emitted."""
        tokens, accepted = [], []
        for row, (committed, kept) in enumerate(zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True)):
            emitted = [token for token in committed if token != ABSENT][: self._left[row]]
            for place, token in enumerate(emitted):
                if token in self.eos_ids:
                    emitted = emitted[: place + 1]
                    self._left[row] = len(emitted)
            self._left[row] -= len(emitted)
            tokens.append(emitted)
            accepted.append(min(kept, len(emitted)))
        proposed = (draft.tokens != ABSENT).sum(1).tolist()
        drafted = [number if emitted else 0 for number, emitted in zip(proposed, tokens, strict=True)]
        return Step(tokens=tokens, accepted=accepted, drafted=drafted, finished=[left == 0 for left in self._left])

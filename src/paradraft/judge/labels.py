"""Labels drafted tokens by whether the answer stays right with them (Garipov et al. 2025, "AutoJudge", Alg. 1).

The target answers a question. At the first token that the draft model would have drafted otherwise, the drafted token
takes its place, and the target goes on from there. If the answer is still right, the token is harmless and stays in the
text; else the target's own token stays. The same follows at the next such token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import torch

from paradraft.core import Draft, Request, Verdict
from paradraft.data.questions import ID
from paradraft.engine.engine import Engine
from paradraft.models.target import Target
from paradraft.text.final_number import final_number

TOGETHER = 16
"""Number of questions whose texts are decoded in one batch."""


@dataclass(frozen=True, kw_only=True)
class MarkedQuestion:
    """A question, and the number with which right answers end."""

    id: str
    prompt: list[int]
    right: Decimal


@dataclass(frozen=True, kw_only=True)
class Label:
    """A drafted token in the place of the text's token at `position`; it is that token if it is harmless."""

    position: int
    token: int
    is_harmless: bool


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """A prompt and its answer, of which the first `prompt` tokens are the prompt, and labels in order of position;
    without labels where the target's own answer is wrong."""

    id: str
    prompt: int
    tokens: list[int]
    labels: list[Label]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            ID: self.id,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "labels": [[label.position, label.token, label.is_harmless] for label in self.labels],
        }

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> LabelledText:
        """The text of `as_json`."""
        labels = [
            Label(position=position, token=token, is_harmless=is_harmless)
            for position, token, is_harmless in values["labels"]
        ]
        return cls(id=values[ID], prompt=values["prompt"], tokens=values["tokens"], labels=labels)


class Labeller:
    """Labels the answers of a target; greedy.

    Args:
        draft: the draft model, with the target's tokenizer.

    Raises:
        ValueError: its vocabulary is another one.
    """

    def __init__(self, engine: Engine, draft: Target, *, max_new_tokens: int) -> None:
        if draft.tokenizer.get_vocab() != engine.target.tokenizer.get_vocab():
            raise ValueError("the draft model has another vocabulary than the target: name one of the same family")
        self._engine, self._draft, self._most = engine, draft, max_new_tokens
        self._reading = asyncio.Lock()

    async def label(self, questions: Iterable[MarkedQuestion]) -> AsyncIterator[LabelledText]:
        """Labels questions, some at a time, and yields each that is done."""
        left = iter(questions)
        running: set[asyncio.Task[LabelledText]] = set()
        try:
            while True:
                while len(running) < TOGETHER and (question := next(left, None)) is not None:
                    running.add(asyncio.create_task(self._labelled(question)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()

    async def _labelled(self, question: MarkedQuestion) -> LabelledText:
        text, first = await self._finished(question.prompt, self._most), len(question.prompt)
        labels: list[Label] = []
        if self._is_right(question, text):
            at, drafted = first, await self._drafted(text, first)
            while (position := self._next_difference(text, drafted, first, at)) is not None:
                token = drafted[position - first]
                changed = await self._finished([*text[:position], token], first + self._most - position - 1)
                labels.append(Label(position=position, token=token, is_harmless=self._is_right(question, changed)))
                if labels[-1].is_harmless:
                    text = changed
                    drafted[position + 1 - first :] = await self._drafted(text, position + 1)
                at = position + 1
        return LabelledText(id=question.id, prompt=first, tokens=text, labels=labels)

    @staticmethod
    def _next_difference(text: Sequence[int], drafted: Sequence[int], first: int, at: int) -> int | None:
        return next((place for place in range(at, len(text)) if text[place] != drafted[place - first]), None)

    async def _finished(self, beginning: list[int], room: int) -> list[int]:
        """A text to its end."""
        if room < 1 or beginning[-1] in self._engine.target.eos_ids:
            return beginning
        return beginning + (await self._engine.agenerate(beginning, max_new_tokens=room)).tokens

    def _is_right(self, question: MarkedQuestion, text: list[int]) -> bool:
        answer = self._engine.target.tokenizer.decode(text[len(question.prompt) :], skip_special_tokens=True)
        return final_number(answer) == question.right

    async def _drafted(self, text: list[int], first: int) -> list[int]:
        """What the draft model would have drafted at each position from `first` on."""
        async with self._reading:
            return await asyncio.to_thread(drafted_tokens, self._draft, text, first)


def drafted_tokens(draft: Target, text: Sequence[int], first: int) -> list[int]:
    """The tokens that a model thinks likeliest at the positions of a text from `first` on."""
    draft.start()
    draft.join([Request(tokens=list(text[:first]))])
    tokens: list[int] = []
    for at in range(first, len(text), draft.lm.width):
        new = list(text[at : at + draft.lm.width])
        out = draft.forward(Draft.chain(torch.tensor([new[:-1]], dtype=torch.long, device=draft.device)))
        tokens += out.logits[0, :, : draft.vocab_size].argmax(-1).tolist()
        draft.commit(Verdict(paths=[list(range(len(new) - 1))], tokens=[new]), out)
    return tokens

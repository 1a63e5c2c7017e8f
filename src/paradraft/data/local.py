"""Generates answers with the target in this process, in batches, with or without a drafter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from paradraft.data.questions import EOS, LENGTH, Answer, Question, next_prompt, turns_of
from paradraft.data.regenerate import Outcome
from paradraft.engine.engine import Engine
from paradraft.models.quantization import stored_parts
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.text.chat_template import ChatTemplate, Message, check_variables
from paradraft.text.tokenization import encode_prompt
from paradraft.verify import rule_class

WINDOW = 32
"""Prompts are sorted by length within this many batches, so that a half-written file is like the complete one."""


@dataclass(frozen=True, kw_only=True)
class InProcess:
    """Answers questions with an engine.

    Drafter and batch size change the speed but not the answers, so they are not among the settings.

    Args:
        engine: with the match rule.
        sampling: for all turns; the seed of each turn is derived from it.

    Raises:
        ValueError: a limit is below 1, or the chat template does not know a variable.
    """

    engine: Engine
    target: str
    sampling: Sampling
    max_new_tokens: int
    batch_size: int = 8
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert rule_class(self.engine.speculation.verify).same_tokens and not self.sampling.processors
        for name in ("batch_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use at least 1")
        check_variables(self.chat_template_kwargs, self.engine.target.tokenizer)

    @property
    def settings(self) -> dict[str, object]:
        """Settings that decide the text of the answers."""
        target = self.engine.target
        sampling = {name: value for name, value in asdict(self.sampling).items() if name != "processors"}
        return {
            "target": self.target,
            "dtype": dtype_of(target),
            "capacity": target.capacity,
            "max_new_tokens": self.max_new_tokens,
            # Files of former versions lack this setting, which counts as None.
            "chat_template_kwargs": dict(self.chat_template_kwargs) or None,
            **sampling,
            "digest of the target": digest_of(target),
        }

    def check(self, questions: list[Question]) -> None:
        """Raises ValueError, naming the line, for the first question that the model cannot answer."""
        checked = ""
        for question in questions:
            if question.place == checked:
                continue
            checked = question.place
            prompt = next_prompt(question, [])
            assert prompt is not None
            try:
                if not isinstance(prompt, str):
                    # All turns, because a template may refuse the order of roles only later.
                    messages = question.record["messages"]
                    self._tokens(messages[: turns_of(messages)[-1]])
                self.engine.check([self._tokens(prompt)], max_new_tokens=self.max_new_tokens)
            except (ValueError, TypeError, KeyError, TemplateError) as error:
                raise ValueError(f"{question.place}: {error}") from None

    def answer(self, questions: list[Question], take: Callable[[Outcome], None]) -> None:
        """Answers batch by batch and passes each outcome to `take` once its batch is done."""
        for batch in _batches(questions, self.batch_size):
            for outcome in self._outcomes(batch):
                take(outcome)

    def _outcomes(self, batch: list[Question]) -> list[Outcome]:
        answers: list[list[Answer]] = [[] for _ in batch]
        while prompts := self._prompts(batch, answers):
            seeds = [batch[row].seed(self.sampling.seed, len(answers[row])) for row in prompts]
            results = self.engine.generate(
                list(prompts.values()),
                max_new_tokens=self.max_new_tokens,
                sampling=[replace(self.sampling, seed=seed) for seed in seeds],
                batch_size=self.batch_size,
            )
            for row, result in zip(prompts, results, strict=True):
                reason = LENGTH if result.finish_reason == "length" else EOS
                answers[row].append(Answer(text=result.text, finish_reason=reason, tokens=len(result.tokens)))
        return [
            Outcome(question=question, answers=tuple(turns)) for question, turns in zip(batch, answers, strict=True)
        ]

    def _prompts(self, batch: list[Question], answers: list[list[Answer]]) -> dict[int, list[int]]:
        """The prompt, by row, of the next turn; without rows that have no other turn, or no room for it."""
        prompts = [next_prompt(question, turns) for question, turns in zip(batch, answers, strict=True)]
        tokens = {row: self._tokens(prompt) for row, prompt in enumerate(prompts) if prompt is not None}
        room = self.engine.target.capacity - self.max_new_tokens
        return {row: prompt for row, prompt in tokens.items() if len(prompt) <= room}

    def _tokens(self, prompt: str | list[Message]) -> list[int]:
        tokenizer = self.engine.target.tokenizer
        if isinstance(prompt, str):
            return encode_prompt(prompt, tokenizer)
        if not tokenizer.chat_template:
            raise ValueError(
                f"{self.target!r} has no chat template, so conversations cannot be asked: use a model that has one, "
                'or {"prompt": "some text"} lines'
            )
        return ChatTemplate(tokenizer=tokenizer, variables=self.chat_template_kwargs).tokens(prompt, ask=True)


def _batches(questions: list[Question], batch_size: int) -> Iterator[list[Question]]:
    """Groups questions by length, because a batch takes as long as its longest row."""

    def size(question: Question) -> tuple[int, int]:
        messages = question.record.get("messages", [])
        characters = sum(len(message["content"]) for message in messages) or len(question.record.get("prompt", ""))
        return len(turns_of(messages)) if messages else 1, characters

    for start in range(0, len(questions), WINDOW * batch_size):
        window = sorted(questions[start : start + WINDOW * batch_size], key=size)
        for first in range(0, len(window), batch_size):
            yield window[first : first + batch_size]


def dtype_of(target: Target) -> str:
    """Dtype of a model's weights, and the storage of its head if that is quantized."""
    head = target.lm.model.get_output_embeddings().weight
    dtype = str(head.dtype).removeprefix("torch.")
    return dtype if len(stored_parts(head)) == 1 else f"{dtype}, {type(head).__name__}"


def digest_of(target: Target) -> str:
    """Digest of a sample of all weights, the chat template and the end tokens: tells targets of one name apart."""
    digest = hashlib.sha256(f"{target.tokenizer.chat_template} {sorted(target.eos_ids)}".encode())
    for parameter in target.lm.model.parameters():
        for part in stored_parts(parameter.detach()):
            sampled = part.flatten()[:: max(part.numel() // 64, 1)]
            digest.update(sampled.cpu().double().numpy().tobytes())
    return digest.hexdigest()[:16]

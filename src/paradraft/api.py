"""From names to objects: `load` a target with a drafter, then `generate` or `stream`."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import overload

import torch

from paradraft import drafters
from paradraft.core import GREEDY, Drafter, Prompt, Sampling, Step
from paradraft.decode.lengths import Fixed
from paradraft.decode.sequential import decode
from paradraft.decode.stats import Clock, Stats
from paradraft.decode.stops import Stops
from paradraft.models.loading import POCKET, Runtime, load_target
from paradraft.models.target import Target

CPU = Runtime()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to one prompt.

    Args:
        text: the decoded new tokens, special tokens left out.
        tokens: the new token ids; the last one is the end token if the text ended by itself.
        stats: counts and times.
    """

    text: str
    tokens: list[int]
    stats: Stats


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a streamed answer: the new tokens of one round.

    Args:
        drafted_text: the text of the tokens that were drafted and accepted.
        own_text: the text of the target's own token.
        tokens: the ids of both.
        accepted: how many of them, from the first, were drafted.
    """

    drafted_text: str
    own_text: str
    tokens: list[int]
    accepted: int

    @property
    def text(self) -> str:
        """The text of the round; all rounds joined are the whole answer."""
        return self.drafted_text + self.own_text


class Engine:
    """A target, a drafter, and how many tokens to draft.

    Build one with `load`.
    """

    def __init__(self, target: Target, drafter: Drafter, *, k: int) -> None:
        if not 1 <= k < target.lm.width:
            raise ValueError(f"k={k}: draft 1 to {target.lm.width - 1} tokens per round")
        if drafter.needs_hidden:
            raise ValueError("this drafter wants hidden states of the target, which no pass returns yet")
        self.target = target
        self.drafter = drafter
        self.k = k
        self.clock = Clock()

    @overload
    def generate(self, prompts: str, *, max_new_tokens: int = 128, sampling: Sampling = GREEDY) -> Result: ...

    @overload
    def generate(
        self, prompts: list[str], *, max_new_tokens: int = 128, sampling: Sampling = GREEDY
    ) -> list[Result]: ...

    def generate(
        self, prompts: str | list[str], *, max_new_tokens: int = 128, sampling: Sampling = GREEDY
    ) -> Result | list[Result]:
        """Answers one prompt, or several one after the other.

        Args:
            prompts: text or texts.
            max_new_tokens: most tokens of an answer.
            sampling: greedy by default.

        Raises:
            ValueError: a prompt is empty, or it and its answer do not fit into the model.
        """
        if isinstance(prompts, list):
            requests = [self._encode(prompt, max_new_tokens, sampling) for prompt in prompts]
            return [self._answer(request, max_new_tokens) for request in requests]
        return self._answer(self._encode(prompts, max_new_tokens, sampling), max_new_tokens)

    def stream(self, prompt: str, *, max_new_tokens: int = 128, sampling: Sampling = GREEDY) -> Iterator[Chunk]:
        """Answers one prompt, piece by piece; never half a character.

        Raises:
            ValueError: as `generate`.
        """
        request = self._encode(prompt, max_new_tokens, sampling)
        return self._chunks(self._steps(request, max_new_tokens))

    def _chunks(self, steps: Iterator[Step]) -> Iterator[Chunk]:
        tokens: list[int] = []
        shown = 0
        for step in steps:
            new, accepted = step.tokens[0], step.accepted[0]
            middle = max(shown, len(self._whole_text(tokens + new[:accepted])))
            tokens += new
            text = self._decode(tokens) if step.finished[0] else self._whole_text(tokens)
            yield Chunk(drafted_text=text[shown:middle], own_text=text[middle:], tokens=new, accepted=accepted)
            shown = max(shown, len(text))

    def _whole_text(self, tokens: list[int]) -> str:
        """The text without the half characters at its end that a later token may complete."""
        return self._decode(tokens).rstrip("\ufffd")

    def _answer(self, request: Prompt, max_new_tokens: int) -> Result:
        tokens = [token for step in self._steps(request, max_new_tokens) for token in step.tokens[0]]
        return Result(text=self._decode(tokens), tokens=tokens, stats=self.clock.stats)

    def _steps(self, request: Prompt, max_new_tokens: int) -> Iterator[Step]:
        self.clock = Clock(torch.cuda.synchronize if self.target.lm.device.type == "cuda" else lambda: None)
        stops = Stops(batch_size=1, eos_ids=self.target.eos_ids, max_new_tokens=max_new_tokens)
        return decode(self.target, self.drafter, request, stops=stops, lengths=Fixed(k=self.k), clock=self.clock)

    def warm_up(self) -> None:
        """Runs the passes that decoding will use once, so that none is compiled in the middle of an answer."""
        stops = Stops(batch_size=1, eos_ids=frozenset(), max_new_tokens=self.k + 2)
        prompt = self._encode_tokens([0], GREEDY)
        for _ in decode(self.target, self.drafter, prompt, stops=stops, lengths=Fixed(k=self.k), clock=Clock()):
            pass

    def check(self, prompts: list[str], *, max_new_tokens: int) -> None:
        """Raises ValueError if a prompt, named by number, is empty, or it and its answer do not fit into the model."""
        for number, prompt in enumerate(prompts, start=1):
            try:
                self._encode(prompt, max_new_tokens, GREEDY)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None

    def _encode(self, prompt: str, max_new_tokens: int, sampling: Sampling) -> Prompt:
        tokens = self.target.tokenizer(prompt)["input_ids"] if prompt else []
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        if len(tokens) + max_new_tokens > self.target.capacity:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and {max_new_tokens} are asked for, but the model has room "
                f"for {self.target.capacity}: shorten the prompt or lower max_new_tokens"
            )
        return self._encode_tokens(tokens, sampling)

    def _encode_tokens(self, tokens: list[int], sampling: Sampling) -> Prompt:
        return Prompt(tokens=torch.tensor([tokens], device=self.target.lm.device), sampling=sampling)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))


def load(target: str, *, drafter: str = "none", draft: str | None = None, k: int = 8, runtime: Runtime = CPU) -> Engine:
    """Loads a target and a drafter.

    Args:
        target: a Hugging Face id, a folder, or "pocket".
        drafter: one of `drafter_names()`; "none" decodes plainly.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: tokens drafted per round, at least 1.
        runtime: device, dtype, compilation.

    Raises:
        ValueError: a name is unknown, or the draft does not fit the target.
    """
    check_draft(drafter, draft, target)
    loaded = load_target(target, runtime)
    return Engine(loaded, load_drafter(drafter, loaded, draft=draft, runtime=runtime), k=k)


def load_drafter(name: str, target: Target, *, draft: str | None, runtime: Runtime) -> Drafter:
    """Builds a drafter for a loaded target.

    Args:
        name: one of `drafter_names()`.
        target: whose text is to be guessed.
        draft: the draft model; None takes the shipped one.
        runtime: the target's.

    Raises:
        ValueError: the drafter is unknown or its draft model does not fit.
    """
    module = drafter_module(name)
    config = module.Config(draft=POCKET if draft is None else draft) if takes_draft(name) else module.Config()
    drafter: Drafter = module.build(config, target, runtime)
    return drafter


def check_draft(drafter: str, draft: str | None, target: str) -> None:
    """Raises ValueError if a draft model is missing, or given to a drafter that has none."""
    if draft is not None and not takes_draft(drafter):
        raise ValueError(f"drafter {drafter!r} takes no draft model, but draft={draft!r} was given")
    if draft is None and takes_draft(drafter) and target != POCKET:
        raise ValueError(f"drafter {drafter!r} needs a draft model: name its folder or Hugging Face id as draft")


def drafter_names() -> list[str]:
    """The files in `paradraft/drafters`."""
    return sorted(module.name for module in pkgutil.iter_modules(drafters.__path__))


def takes_draft(name: str) -> bool:
    """Whether a drafter has a draft model.

    Raises:
        ValueError: there is no such drafter.
    """
    return "draft" in {field.name for field in dataclasses.fields(drafter_module(name).Config)}


def drafter_module(name: str) -> ModuleType:
    """The module of a drafter.

    Raises:
        ValueError: there is no such drafter.
    """
    if name not in drafter_names():
        raise ValueError(f"unknown drafter {name!r}: use one of {', '.join(drafter_names())}")
    return importlib.import_module(f"paradraft.drafters.{name}")

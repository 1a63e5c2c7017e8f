"""A loaded target with its drafter: answers prompts, one by one, in batches, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from paradraft import ragged
from paradraft.core import GREEDY, RULES, Drafter, Prompt, Sampling, Step, Tree
from paradraft.decode.lengths import POLICIES, Fixed, LengthPolicy
from paradraft.decode.sequential import VERIFY, decode
from paradraft.decode.stats import Clock, Stats
from paradraft.decode.stops import HALF_CHARACTER, Stops, find_stop, settled
from paradraft.models.target import Target
from paradraft.request import Request, requests_of


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to one prompt.

    Args:
        text: the decoded new tokens, special tokens left out, up to the stop string if one ended it, and
            without half a character if the limit cut one.
        tokens: the new token ids; the last one is the end token if the text ended by itself.
        finish_reason: "eos", "stop" (a stop string) or "length".
        stats: counts of this answer; the times are those of the batch it was in.
        accepted: for each round, how many of its tokens were drafted; one of the target's own follows
            them, but where the answer ends before it.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    accepted: tuple[int, ...]


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
    """A target, a drafter, and how to draft and verify.

    Build one with `load`, which explains the settings.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        k: int,
        verify: str = "match",
        tree: Tree | None = None,
        lengths: str = "fixed",
    ) -> None:
        if not 1 <= k < target.lm.width:
            raise ValueError(f"k={k}: draft 1 to {target.lm.width - 1} tokens per round")
        if drafter.needs_hidden:
            raise ValueError("this drafter wants hidden states of the target, which no pass returns yet")
        if verify not in RULES:
            raise ValueError(f"verify={verify!r}: use one of {', '.join(RULES)}")
        if lengths not in POLICIES:
            raise ValueError(f"lengths={lengths!r}: use one of {', '.join(POLICIES)}")
        if tree is not None:
            if not drafter.can_branch:
                raise ValueError("this drafter drafts chains only: leave the tree out")
            if tree.nodes >= target.lm.width:
                raise ValueError(f"a tree of {tree.nodes} nodes: a pass has room for {target.lm.width - 1}")
            aside = [path for path in tree.paths or () if any(path[:-1])]
            if aside and not drafter.can_branch_aside:
                raise ValueError(f"tree path {aside[0]}: this drafter branches from its best tokens only, remove it")
            if tree.depth is not None and tree.depth > k:
                raise ValueError(f"a tree path is {tree.depth} tokens deep, but k={k}: raise k or shorten the path")
        self.target = target
        self.drafter = drafter
        self.k = k
        self.verify = verify
        self.tree = tree
        self.deepest = k if tree is None else min(k, tree.depth or tree.nodes)
        """Most tokens of a path of a draft."""
        self.lengths: LengthPolicy = POLICIES[lengths](self.deepest)
        self.clock = Clock()
        """Times and counts of the last batch."""

    @overload
    def generate(
        self,
        prompts: str,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: str | Sequence[str] = (),
        batch_size: int = 8,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: str | Sequence[str] = (),
        batch_size: int = 8,
    ) -> Result | list[Result]:
        """Answers one prompt, or several in batches.

        Args:
            prompts: a text or texts, which begin with one BOS where the tokenizer wants one, and end without an
                end-of-text; or rows of token ids, which are taken as they are.
            max_new_tokens: most tokens of an answer, for all prompts or for each.
            sampling: greedy by default; for all prompts or for each.
            stop: strings that end an answer; its text ends before the first of them.
            batch_size: most prompts that are answered together.

        Raises:
            ValueError: a prompt is empty or has an unknown token id, it and its answer do not fit into the
                model, or a batch does not fit into memory. Prompts are named by number, and no work was done.
        """
        rows = [prompts] if isinstance(prompts, str) else prompts
        requests = requests_of(self.target, rows, max_new_tokens, sampling)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: use at least 1")
        results: list[Result] = []
        for start in range(0, len(requests), batch_size):
            results += self._answers(requests[start : start + batch_size], _strings(stop))
        return results[0] if isinstance(prompts, str) else results

    def stream(
        self, prompt: str, *, max_new_tokens: int = 128, sampling: Sampling = GREEDY, stop: str | Sequence[str] = ()
    ) -> Iterator[Chunk]:
        """Answers one prompt, piece by piece: never half a character, and nothing that is taken back.

        Raises:
            ValueError: as `generate`.
        """
        requests = requests_of(self.target, [prompt], max_new_tokens, sampling)
        strings = _strings(stop)
        return self._chunks(self._steps(requests, self._stops(requests, strings)), strings)

    def _chunks(self, steps: Iterator[Step], strings: tuple[str, ...]) -> Iterator[Chunk]:
        tokens: list[int] = []
        shown = 0
        for step in steps:
            new, accepted = step.tokens[0], step.accepted[0]
            drafted = settled(self._text(tokens + new[:accepted]), strings)
            tokens += new
            text = self._text(tokens)
            text = _final(text, strings) if step.finished[0] else settled(text, strings)
            middle = min(max(shown, len(drafted)), len(text))
            yield Chunk(drafted_text=text[shown:middle], own_text=text[middle:], tokens=new, accepted=accepted)
            shown = max(shown, len(text))

    def _answers(self, requests: list[Request], strings: tuple[str, ...]) -> list[Result]:
        stops = self._stops(requests, strings)
        answers: list[list[int]] = [[] for _ in requests]
        rounds: list[list[int]] = [[] for _ in requests]
        for step in self._steps(requests, stops):
            for row, tokens, drafted in zip(step.rows, step.tokens, step.accepted, strict=True):
                answers[row] += tokens
                rounds[row] += [drafted] * bool(tokens)
        results = []
        for row, tokens in enumerate(answers):
            text = _final(self._text(tokens), strings)
            stats = self.clock.stats_of(row)
            reason, accepted = stops.reasons[row], tuple(rounds[row])
            results.append(Result(text=text, tokens=tokens, finish_reason=reason, stats=stats, accepted=accepted))
        return results

    def _stops(self, requests: list[Request], strings: tuple[str, ...]) -> Stops:
        limits = [request.max_new_tokens for request in requests]
        return Stops(limits=limits, eos_ids=self.target.eos_ids, strings=strings, text_of=self._text)

    def _steps(self, requests: list[Request], stops: Stops) -> Iterator[Step]:
        self.clock = Clock.on(self.target.lm.device)
        prompt = self.prompt([r.tokens for r in requests], tuple(r.sampling for r in requests))
        return decode(
            self.target,
            self.drafter,
            prompt,
            VERIFY[self.verify],
            stops=stops,
            lengths=self.lengths,
            clock=self.clock,
        )

    def prompt(self, rows: list[list[int]], sampling: tuple[Sampling, ...]) -> Prompt:
        """Token ids and settings of a batch, with the engine's own rule and tree."""
        return Prompt(
            tokens=ragged.from_lists(rows, self.target.lm.device),
            sampling=sampling,
            rule=self.verify,
            tree=self.tree,
            wants_confidence=self.lengths.wants_confidence,
        )

    def warm_up(self, batch_size: int = 1) -> None:
        """Runs the passes that decoding will use, so that none is compiled in the middle of an answer; twice where
        passes that come again are recorded."""
        prompt = self.prompt([[0]] * batch_size, (GREEDY,) * batch_size)
        verify, lengths = VERIFY[self.verify], Fixed(self.k)
        for _ in range(2 if self.target.lm.is_replayed else 1):
            stops = Stops(limits=[self.k + 2] * batch_size, eos_ids=frozenset())
            for _ in decode(self.target, self.drafter, prompt, verify, stops=stops, lengths=lengths, clock=Clock()):
                pass

    def check(
        self,
        prompts: list[str] | list[list[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
    ) -> None:
        """Raises the ValueError that `generate` would, without answering."""
        self._stops(requests_of(self.target, prompts, max_new_tokens, sampling), _strings(stop))

    def _text(self, tokens: list[int]) -> str:
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))


def _final(text: str, strings: tuple[str, ...]) -> str:
    """The text of an answer: up to the stop string, and without half a character at its end."""
    return text[: find_stop(text, strings)].rstrip(HALF_CHARACTER)


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)

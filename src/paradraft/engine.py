"""A loaded target with its drafter: answers prompts, one by one, in batches, or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import overload

from paradraft import ragged
from paradraft.core import RULES, Drafter, Prompt, RoundOutput
from paradraft.decode.draft_length import POLICIES, Fixed, LengthPolicy
from paradraft.decode.generation import AnswerText, Stops, StopStrings, stop_strings
from paradraft.decode.sequential import VERIFY, decode
from paradraft.decode.stats import Clock, Stats
from paradraft.drafters import check_draft, load_drafter
from paradraft.errors import whole_number
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.threads import one_torch_thread
from paradraft.models.loading import load_target
from paradraft.models.presets import check_has_weights
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.models.tokenization import Detokenizer
from paradraft.request import Request, requests_of
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import Tree
from paradraft.turns import Turn, Turns

CPU = Runtime()


def load(
    target: str,
    *,
    drafter: str = "none",
    draft: str | None = None,
    k: int = 8,
    verify: str = "match",
    tree: Tree | int | None = None,
    lengths: str = "fixed",
    runtime: Runtime = CPU,
) -> Engine:
    """Loads a target and a drafter.

    Args:
        target: a Hugging Face id, a folder, or "pocket".
        drafter: one of `drafter_names()`, with settings if wanted, such as "ngram:max_ngram=5"; "none" decodes plainly.
        draft: the draft model, for drafters that have one; the pocket target brings its own.
        k: most tokens drafted per round, one behind the other, at least 1.
        verify: "match" gives the same tokens with every drafter; "rejection" gives the same
            distribution and accepts more when sampling.
        tree: let drafts branch: a `Tree`, or a number of nodes to grow to. None drafts chains.
        lengths: how many of the k tokens to draft: "fixed" all, "heuristic" more after success,
            "confidence" while the drafter is sure, "expected" what pays on this machine.
        runtime: device, dtype, compilation.

    Raises:
        ValueError: a name or setting is unknown, or the draft does not fit the target.
    """
    check_draft(drafter, draft, target)
    for name in (target, draft or ""):
        check_has_weights(name)
    loaded = load_target(target, runtime)
    model = load_drafter(drafter, loaded, draft=draft, runtime=runtime)
    shape = Tree(budget=tree) if isinstance(tree, int) else tree
    return Engine(loaded, model, k=k, verify=verify, tree=shape, lengths=lengths)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to one prompt.

    Args:
        text: the text of the new tokens, as it follows the prompt's: the space between the two is part of it. It has
            no special tokens, it ends before the stop string if one ended it, and if the limit cut a character, what
            there is of it is left out.
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

    Any number of threads may use one engine. It answers one call of `generate`, or one stream, after the other; a
    stream that its reader leaves waiting makes room and goes on later: with the match rule with the same text, with the
    rejection rule with a text of the same distribution.

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
        self._detokenizer = Detokenizer(target.tokenizer)
        self._turns = Turns()
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
                end-of-text; or lists of token ids (whole numbers, numpy's too), which are taken as they are.
            max_new_tokens: most tokens of an answer, for all prompts or for each.
            sampling: greedy by default; for all prompts or for each.
            stop: strings that end an answer; its text ends before the first of them. One that names a special token,
                such as "<|im_end|>", is found where the model writes that token, which the text does not show.
            batch_size: most prompts that are answered together.

        Raises:
            ValueError: a setting has the wrong type, a prompt is empty or has an unknown token id, it and its answer do
                not fit into the model, or a batch does not fit into memory. Prompts are named by number, and no work
                was done.
        """
        rows = [prompts] if isinstance(prompts, str) else prompts
        requests = requests_of(self.target, rows, max_new_tokens, sampling)
        strings = self._strings(stop)
        if whole_number("batch_size", batch_size) < 1:
            raise ValueError(f"batch_size={batch_size}: use at least 1")
        results: list[Result] = []
        for start in range(0, len(requests), batch_size):
            results += self._answers(requests[start : start + batch_size], strings)
        return results[0] if isinstance(prompts, str) else results

    def stream(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
    ) -> Iterator[Chunk]:
        """Answers one prompt, piece by piece: the texts of all pieces, joined, are the `text` that `generate` returns.

        A piece of text that a later token may still change comes with that token: half a character, or the beginning of
        a stop string.

        Raises:
            ValueError: as `generate`.
        """
        requests = requests_of(self.target, [prompt], max_new_tokens, sampling)
        strings = self._strings(stop)
        text = self._text(requests[0], strings)
        self.clock = Clock.on(self.target.lm.device)
        return self._chunks(self._streamed(requests[0], self._stops(requests, strings), self.clock), text)

    def _streamed(self, request: Request, stops: Stops, clock: Clock) -> Iterator[RoundOutput]:
        """The rounds of one request. If others have used the engine since the last one, its text so far is read again.

        With the match rule this changes no token, because every position has its own random numbers.
        """
        turn, tokens = Turn(), list[int]()
        steps: Iterator[RoundOutput] = iter(())
        try:
            while not stops.all_finished:
                with self._turns.round(turn) as is_unchanged, self._torch_threads():
                    if not is_unchanged:
                        clock.skip()
                        so_far = replace(request, tokens=request.tokens + tokens)
                        steps = self._steps([so_far], stops, clock, answered=(len(tokens),))
                    step = next(steps)
                tokens += step.tokens[0]
                if stops.all_finished:
                    self._turns.end(turn)  # whether or not the reader comes back
                yield step
        finally:
            self._turns.end(turn)

    def _chunks(self, steps: Iterator[RoundOutput], text: AnswerText) -> Iterator[Chunk]:
        for step in steps:
            new, accepted = step.tokens[0], step.accepted[0]
            drafted, own = (list(map(text.add, part)) for part in (new[:accepted], new[accepted:]))
            if step.finished[0]:
                (own or drafted).append(text.end())
            yield Chunk(drafted_text="".join(drafted), own_text="".join(own), tokens=new, accepted=accepted)

    def _answers(self, requests: list[Request], strings: StopStrings) -> list[Result]:
        stops = self._stops(requests, strings)
        answers: list[list[int]] = [[] for _ in requests]
        rounds: list[list[int]] = [[] for _ in requests]
        with self._alone():
            self.clock = clock = Clock.on(self.target.lm.device)
            for step in self._steps(requests, stops, clock):
                for row, tokens, drafted in zip(step.rows, step.tokens, step.accepted, strict=True):
                    answers[row] += tokens
                    rounds[row] += [drafted] * bool(tokens)
        results = []
        for row, (request, tokens) in enumerate(zip(requests, answers, strict=True)):
            growing = self._text(request, strings)
            text = "".join(map(growing.add, tokens)) + growing.end()
            stats = clock.stats_of(row)
            reason, accepted = stops.reasons[row], tuple(rounds[row])
            results.append(Result(text=text, tokens=tokens, finish_reason=reason, stats=stats, accepted=accepted))
        return results

    def _text(self, request: Request, strings: StopStrings) -> AnswerText:
        """The text of a request's answer, with no token yet."""
        return AnswerText(self._detokenizer.after(request.tokens), strings)

    def _stops(self, requests: list[Request], strings: StopStrings) -> Stops:
        limits = [request.max_new_tokens for request in requests]
        texts = [self._text(request, strings) for request in requests] if strings.patterns else None
        return Stops(limits=limits, eos_ids=self.target.eos_ids, texts=texts)

    def _steps(
        self, requests: list[Request], stops: Stops, clock: Clock, answered: tuple[int, ...] | None = None
    ) -> Iterator[RoundOutput]:
        prompt = self.prompt([r.tokens for r in requests], tuple(r.sampling for r in requests))
        prompt = replace(prompt, answered=answered)
        verify = VERIFY[self.verify]
        return decode(self.target, self.drafter, prompt, verify, stops=stops, lengths=self.lengths, clock=clock)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The engine for one piece of work, from its first round to its last."""
        turn = Turn()
        try:
            with self._turns.round(turn), self._torch_threads():
                yield
        finally:
            self._turns.end(turn)

    def _torch_threads(self) -> AbstractContextManager[None]:
        """One thread for what torch computes in a round, if all passes are in C++ with threads of their own."""
        lms = [self.target.lm, *(part for part in vars(self.drafter).values() if isinstance(part, CausalLM))]
        return one_torch_thread() if all(lm.is_native for lm in lms) else nullcontext()

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
        with self._alone():
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
        requests_of(self.target, prompts, max_new_tokens, sampling)
        self._strings(stop)

    def _strings(self, stop: str | Sequence[str]) -> StopStrings:
        return stop_strings(stop, self._detokenizer.special)

"""Inference engine: a target and its drafter, with generate, stream and async entry points."""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, overload

from paradraft.core import Drafter, Request
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import AnswerText, Generation, StopStrings, stop_strings
from paradraft.decode.lengths.draft_length import POLICIES, Fixed, LengthPolicy
from paradraft.decode.logprobs import TokenLogprobs
from paradraft.decode.payoff import Compared, Payoff
from paradraft.decode.pearl.pearl import AheadBatch, best_gamma
from paradraft.decode.pearl.remote import Span
from paradraft.decode.stats import Clock, Stats, added
from paradraft.drafters.none import NoDrafter
from paradraft.engine.request import Prompt, Prompts, requests_of, rows_of, tokens_of
from paradraft.engine.scheduler import Scheduler
from paradraft.engine.speculation import Speculation
from paradraft.errors import whole_number
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.threads import one_torch_thread, torch_threads
from paradraft.models.target import Target
from paradraft.placement import on_cpus
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.text.chat_template import ask_tokens, template_of
from paradraft.text.tokenization import Detokenizer
from paradraft.verify import Verify, load_rule

MOST_LOGPROBS = 20
"""Most top tokens reported for each position of an answer."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to one prompt.

    Args:
        text: the text of the new tokens as it follows the prompt's, including the space between the two. It has no
            special tokens, ends before the stop string, and leaves out a character that the limit cut.
        tokens: new token ids; the last is the EOS token if finish_reason is "eos".
        finish_reason: "eos", "stop" (a stop string) or "length".
        stats: counts of this answer; the times are those of its batch.
        accepted: accepted draft tokens of each round; one of the target's own follows unless the answer ends first.
        delivered_s: seconds from the request to the tokens of each round. The first is the time to first token (TTFT),
            the differences are the inter-token latencies (ITL).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    accepted: tuple[int, ...]
    delivered_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The new tokens of one round of a streamed answer.

    Args:
        drafted_text: text of the accepted draft tokens.
        own_text: text of the target's own token.
        tokens: ids of the accepted tokens, then of the target's own.
        accepted: number of accepted draft tokens.
        drafted: number of tokens drafted in the round, side branches included.
        finish_reason: as in a `Result`, in the last chunk; None before.
        logprobs: the target's log probabilities of the tokens, if requested.
    """

    drafted_text: str
    own_text: str
    tokens: list[int]
    accepted: int
    drafted: int = 0
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """Text of the round; the texts of all rounds joined are the answer."""
        return self.drafted_text + self.own_text


def _chunks_of(generation: Generation, first: int, last: int) -> Iterator[Chunk]:
    begin = generation.round_ends[first - 1] if first else 0
    reason = None if generation.error is not None else generation.finish_reason
    rounds = len(generation.round_ends)  # read after the reason, which is set after the last round
    for index in range(first, last):
        accepted, end = generation.accepted[index], generation.round_ends[index]
        pieces = generation.pieces[begin:end]
        yield Chunk(
            drafted_text="".join(pieces[:accepted]),
            own_text="".join(pieces[accepted:]),
            tokens=generation.tokens[begin:end],
            accepted=accepted,
            drafted=generation.drafted[index],
            finish_reason=reason if index == rounds - 1 else None,
            logprobs=tuple(generation.logprobs[begin:end]),
        )
        begin = end


class Engine:
    """A target, a drafter and their speculation settings; `load` builds one and explains the settings.

    Threads may share an engine: their requests are decoded together, each as one row of a batch, and a thread that
    waits for tokens runs the next round for all. A request has the same text as alone with the match rule, and the
    same distribution with the rejection rule.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        speculation: Speculation,
        *,
        kept_rows: int = 0,
        cpus: tuple[int, ...] | None = None,
        tries_plain: bool = False,
    ) -> None:
        speculation = speculation.fitted_to(drafter).settled(
            drafts=not isinstance(drafter, NoDrafter), is_exact=target.lm.is_native
        )
        most = target.lm.width - 1
        if speculation.k > most:
            raise ValueError(f"k={speculation.k}: draft 1 to {most} tokens per round")
        if drafter.max_k is not None and speculation.k > drafter.max_k:
            most_k = drafter.max_k
            raise ValueError(
                f"k={speculation.k}: this drafter drafts at most {most_k} tokens per round, set k={most_k}"
            )
        speculation.check_drafter(drafter)
        rule = load_rule(speculation.verify)
        if rule.warning is not None:
            warnings.warn(f"verify={speculation.verify!r}: {rule.warning}", stacklevel=2)
        if (nodes := speculation.nodes_of(drafter)) > most:
            raise ValueError(f"a tree of {nodes} nodes: a pass has room for {most}")
        target.lm.check_hidden_layers(drafter.hidden_layers)
        kept_rows = whole_number("kept_rows", kept_rows)
        if kept_rows < 0:
            raise ValueError(f"kept_rows={kept_rows}: use 0 (keep none) or more")
        self.target = target
        self.drafter = drafter
        self._cpus = cpus
        if speculation.gamma == "auto":
            with self.in_round():
                speculation = replace(speculation, gamma=best_gamma(target, drafter, speculation.k))
        self.speculation = speculation
        # With other rules a plain round would change which text a seed gives.
        tries_plain = tries_plain and rule.same_tokens and not isinstance(drafter, NoDrafter)
        self.lengths = Compared(POLICIES[speculation.lengths](speculation.depth), tries_plain=tries_plain)
        self._batch = self.new_batch(kept_rows=kept_rows)
        self._scheduler = Scheduler(self._batch, self.in_round)
        self._detokenizer = Detokenizer(target.tokenizer)
        self._ids = itertools.count()

    def __repr__(self) -> str:
        lm = self.target.lm
        passes = "in C++" if lm.is_native else "by PyTorch"
        name, dtype = lm.model.config.name_or_path, str(lm.model.dtype).removeprefix("torch.")
        return f"<Engine of {name!r} in {dtype}, passes {passes}, {self.speculation}>"

    @property
    def spans(self) -> list[Span]:
        """Busy times of target and drafter in the last rounds of PEARL; empty without `gamma`."""
        return list(self._batch.spans) if isinstance(self._batch, AheadBatch) else []

    @property
    def clock(self) -> Clock:
        """Times and counts since the engine was last idle."""
        return self._batch.clock

    @property
    def payoff(self) -> Payoff:
        """Measured gain or loss of drafting so far."""
        return self.lengths.payoff

    @property
    def advice(self) -> str | None:
        """One sentence with a fix if drafting slowed answers down or was hardly ever accepted.

        Only a clear difference counts: None also if few tokens were decoded or timings were noisy.
        """
        return self.payoff.advice(self.speculation.instead)

    def close(self) -> None:
        """Ends the drafter's process, if any; `with load(…) as engine` calls it."""
        self.drafter.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: str | Sequence[str] | None = None,
        batch_size: int = 8,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Prompts,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: str | Sequence[str] | None = None,
        batch_size: int = 8,
    ) -> Result | list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: str | Sequence[str] | None = None,
        batch_size: int = 8,
    ) -> Result | list[Result]:
        """Answers one prompt, or several in batches.

        Args:
            prompts: a text, which gets one BOS if the tokenizer adds it, and no EOS; or token ids, taken as they are: a
                list, a tuple, an array or a tensor. Or several of these: a list or a tuple, or a two-dimensional array
                or tensor.
            max_new_tokens: most tokens of an answer, for all prompts or for each.
            sampling: greedy by default; for all prompts or for each.
            stop: strings that end an answer; its text ends before the first match. A string that names a special token,
                such as "<|im_end|>", matches that token, which the text does not show.
            batch_size: maximum batch size.

        Raises:
            ValueError: before any work: a setting has the wrong type, a prompt is empty or has an unknown token id, it
                and its answer exceed the model's context, or a batch does not fit into memory. Prompts are numbered
                from 1.
        """
        rows, is_one = rows_of(prompts)
        requests = requests_of(self.target, rows, max_new_tokens, sampling)
        strings = self._strings(stop)
        if whole_number("batch_size", batch_size) < 1:
            raise ValueError(f"batch_size={batch_size}: use at least 1")
        generations = [self._generation(request, strings if strings.patterns else None) for request in requests]
        results: dict[int, Result] = {}
        with closing(self._scheduler.answer(generations, most=batch_size)) as finished:
            for generation in finished:
                results[generation.request.id] = self._result(generation, strings)
        answers = [results[generation.request.id] for generation in generations]
        return answers[0] if is_one else answers

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Result:
        """Answers a conversation, such as `[{"role": "user", "content": "Hello"}]`, through the model's chat template.

        Args:
            messages: each with a role and a content; the last is not the assistant's.
            max_new_tokens, sampling, stop: see `generate`.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": False}`.

        Raises:
            ValueError: as `generate`; or the model has no chat template, or the template refuses the conversation.
        """
        tokens = self.chat_tokens(messages, chat_template_kwargs)
        return self.generate(tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as `generate` and `stream` read it.

        Raises:
            ValueError: it is neither a text nor token ids.
        """
        return tokens_of(self.target, prompt)

    def chat_tokens(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, a prompt for `generate` and `stream`; see `chat`.

        Raises:
            ValueError: the model has no chat template, or the template refuses the conversation.
        """
        return ask_tokens(messages, template_of(self.target.tokenizer, chat_template_kwargs))

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
    ) -> Generator[Chunk, None, None]:
        """Answers one prompt as a stream of chunks, whose texts joined are the `text` that `generate` returns.

        Text that a later token may still change, half a character or the beginning of a stop string, comes with that
        token.

        Raises:
            ValueError: as `generate`.
        """
        (request,) = requests_of(self.target, [prompt], max_new_tokens, sampling)
        return self._chunks(self._generation(request, self._strings(stop)))

    def astream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
        k: int | None = None,
        logprobs: int | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for an event loop: `async for chunk in engine.astream(…)`.

        One thread decodes the requests of all event loops together. Leaving the loop early, or the end of its task,
        cancels the request.

        Args:
            prompt, max_new_tokens, sampling, stop: see `generate`.
            k: most tokens drafted per round, at most the engine's; 0 drafts none.
            logprobs: report the log probability of each token and of this many top tokens at its position, under the
                target's distribution before `sampling`.

        Raises:
            ValueError: at the call, not while iterating: as `generate`; or `k` or `logprobs` is not for this engine.
        """
        (request,) = requests_of(self.target, [prompt], max_new_tokens, sampling)
        self._check_round(k, logprobs)
        request = replace(request, k=k, logprobs=logprobs)
        return self._achunks(self._generation(request, self._strings(stop)))

    def _check_round(self, k: int | None, logprobs: int | None) -> None:
        for name, value in (("k", k), ("logprobs", logprobs)):
            if value is not None and self.speculation.gamma is not None:
                raise ValueError(f"{name}={value}: an engine that drafts ahead does not have it, leave {name} out")
        if logprobs is not None and not 0 <= whole_number("logprobs", logprobs) <= MOST_LOGPROBS:
            raise ValueError(f"logprobs={logprobs}: use 0 to {MOST_LOGPROBS}")
        if k is not None and not 0 <= whole_number("k", k) <= self.speculation.k:
            raise ValueError(f"k={k}: this engine drafts at most {self.speculation.k} tokens per round, use 0 to that")

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
    ) -> Result:
        """`generate` of one prompt for an event loop, with its errors; see `astream`."""
        (request,) = requests_of(self.target, [prompt], max_new_tokens, sampling)
        strings = self._strings(stop)
        generation = self._generation(request, strings)
        async for _ in self._achunks(generation):
            pass
        return self._result(generation, strings)

    async def _achunks(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        rounds, has_news = 0, asyncio.Event()
        try:
            self._scheduler.watch(generation, asyncio.get_running_loop(), has_news.set)
            is_over = False
            while not is_over:
                await has_news.wait()
                has_news.clear()
                # In this order: an error is set after the rounds before it, and before the end flag.
                is_over, error, available = generation.is_told, generation.error, generation.told_rounds
                for chunk in _chunks_of(generation, rounds, available):
                    yield chunk
                rounds = available
                if error is not None:
                    raise error
        finally:
            generation.is_cancelled = True

    def _chunks(self, generation: Generation) -> Generator[Chunk, None, None]:
        rounds = 0
        with closing(self._scheduler.stream(generation)) as news:
            for _ in news:
                available = generation.told_rounds
                yield from _chunks_of(generation, rounds, available)
                rounds = available

    def _generation(self, request: Request, strings: StopStrings | None) -> Generation:
        """New generation; without `strings` its text is assembled only at the end."""
        text = None if strings is None else self._text(request, strings)
        return Generation(replace(request, id=next(self._ids)), text)

    def _text(self, request: Request, strings: StopStrings) -> AnswerText:
        return AnswerText(self._detokenizer.after(request.tokens), strings)

    def _result(self, generation: Generation, strings: StopStrings) -> Result:
        pieces = generation.pieces
        if not strings.patterns:
            text = self._text(generation.request, strings)
            pieces = [*map(text.add, generation.tokens), text.end()]
        assert generation.finish_reason is not None
        return Result(
            text="".join(pieces),
            tokens=generation.tokens,
            finish_reason=generation.finish_reason,
            stats=added(generation.stats),
            accepted=tuple(generation.accepted),
            delivered_s=tuple(generation.delivered_s),
        )

    @contextmanager
    def in_round(self) -> Iterator[None]:
        """Sets CPU affinity and torch's threads for rounds: one thread if all passes are in C++, which has a pool."""
        lms: list[CausalLM] = [self.target.lm, *self.drafter.models]
        is_native = all(lm.is_native for lm in lms)
        threads = nullcontext() if self._cpus is None else torch_threads(len(self._cpus))
        with on_cpus(self._cpus), one_torch_thread() if is_native else threads:
            yield

    def warm_up(self, batch_size: int = 1) -> None:
        """Runs the passes of decoding once, so that none is compiled during an answer; twice with CUDA graphs."""
        k = self.speculation.k
        for _ in range(max(self.target.lm.warm_up_rounds, 1)):
            requests = [Request(id=row, tokens=[0], max_new_tokens=k + 2) for row in range(batch_size)]
            with self._scheduler.exclusive():
                for _ in run(self.new_batch(lengths=Fixed(k)), list(map(Generation, requests))):
                    pass

    def new_batch(
        self,
        *,
        target: Target | None = None,
        drafter: Drafter | None = None,
        lengths: LengthPolicy | None = None,
        verify: Verify | None = None,
        keeps_finished: bool = False,
        kept_rows: int = 0,
        kind: Callable[..., Batch] | None = None,
    ) -> Batch:
        """New batch with the engine's settings except those passed; see `Batch`. `kind` replaces its class."""
        settings: dict[str, Any] = {}
        if self.speculation.gamma is not None:
            settings["overlap"] = self.speculation.overlap
        batch_class = kind or (Batch if self.speculation.gamma is None else AheadBatch)
        return batch_class(
            target or self.target,
            drafter or self.drafter,
            lengths=lengths or self.lengths,
            rule=self.speculation.verify,
            tree=self.speculation.tree,
            verify=verify,
            keeps_finished=keeps_finished,
            kept_rows=kept_rows,
            **settings,
        )

    def check(
        self,
        prompts: Prompt | Prompts,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] | None = None,
        k: int | None = None,
        logprobs: int | None = None,
    ) -> None:
        """Raises the ValueError that `generate` or `astream` would, without answering."""
        self._check_round(k, logprobs)
        requests_of(self.target, rows_of(prompts)[0], max_new_tokens, sampling)
        self._strings(stop)

    def _strings(self, stop: str | Sequence[str] | None) -> StopStrings:
        return stop_strings(stop, self._detokenizer.special)

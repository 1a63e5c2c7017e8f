"""Inference engine: a target and its drafter, with generate, stream and async entry points."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from paradraft.core import Drafter, Request
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed, LengthPolicy, length_policy
from paradraft.decode.payoff import Compared, Payoff
from paradraft.decode.pearl.pearl import AheadBatch, best_gamma
from paradraft.decode.pearl.remote import Span
from paradraft.decode.round_log import RoundLog
from paradraft.decode.stats import Clock
from paradraft.drafters.none import NoDrafter
from paradraft.engine.answers import Answers, Chunk, Result, Stop
from paradraft.engine.request import Prompt, Prompts, check_round, requests_of, rows_of, tokens_of
from paradraft.engine.scheduler import Scheduler
from paradraft.engine.speculation import Speculation
from paradraft.errors import whole_number
from paradraft.models.forward.cpu.threads import one_torch_thread, torch_threads
from paradraft.models.target import Target
from paradraft.placement import on_cpus
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.text.chat_template import ask_tokens, template_of
from paradraft.verify import Verify


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
        loads: Callable[[str], Drafter] | None = None,
    ) -> None:
        speculation = speculation.fitted_to(drafter).settled(
            drafts=not isinstance(drafter, NoDrafter), is_exact=target.lm.is_native
        )
        rule = speculation.checked_rule(target, drafter)
        target.lm.check_hidden_layers(drafter.hidden_layers)
        if (kept_rows := whole_number("kept_rows", kept_rows)) < 0:
            raise ValueError(f"kept_rows={kept_rows}: use 0 (keep none) or more")
        self.target = target
        self.drafter = drafter
        self._cpus, self._kept_rows, self._loads = cpus, kept_rows, loads
        if speculation.gamma == "auto":
            with self.in_round():
                speculation = replace(speculation, gamma=best_gamma(target, drafter, speculation.k))
        self.speculation = speculation
        # With other rules a plain round would change which text a seed gives.
        tries_plain = tries_plain and rule.same_tokens and not isinstance(drafter, NoDrafter)
        work = target.relative_work(drafter.models)
        policy = length_policy(
            speculation.lengths, speculation.depth, drafter.traits, reading_work=work,
            reads=lambda prompt: self.drafter.reads(prompt),
        )  # fmt: skip
        self.lengths = Compared(policy, tries_plain=tries_plain)
        self._scheduler = Scheduler(self.new_batch(kept_rows=kept_rows), self.in_round)
        self._answers = Answers(self._scheduler, target.tokenizer)

    def __repr__(self) -> str:
        lm = self.target.lm
        passes = "in C++" if lm.is_native else "by PyTorch"
        name, dtype = lm.model.config.name_or_path, str(lm.model.dtype).removeprefix("torch.")
        return f"<Engine of {name!r} in {dtype}, passes {passes}, {self.speculation}>"

    @property
    def spans(self) -> list[Span]:
        """Busy times of target and drafter in the last rounds of PEARL; empty without `gamma`."""
        return list(batch.spans) if isinstance(batch := self._scheduler.batch, AheadBatch) else []

    @property
    def clock(self) -> Clock:
        """Times and counts since the engine was last idle."""
        return self._scheduler.batch.clock

    @property
    def payoff(self) -> Payoff:
        """Measured gain or loss of drafting so far."""
        return self.lengths.payoff

    @property
    def advice(self) -> str | None:
        """One sentence with a fix if drafting slowed answers down or was hardly ever accepted; None if unclear."""
        return self.payoff.advice(self.speculation.instead)

    def log_rounds(self, file: str | Path, *, most_bytes: int | None = None) -> None:
        """Appends all further answers to a JSONL file, with the places where their rounds began, for training.

        The file holds what users wrote, and is renamed to FILE.1 at `most_bytes`; see `paradraft.decode.round_log`.

        Raises:
            ValueError: the file cannot be written, or the drafter runs ahead.
        """
        if self.speculation.gamma is not None:
            raise ValueError("rounds: with gamma drafts begin before rounds do, leave gamma out")
        self._scheduler.on_end = RoundLog(Path(file), self.target.tokenizer, most_bytes=most_bytes).add

    def swap_drafter(self, draft: str | Path) -> None:
        """Drafts with another folder of the same kind of drafter from the next round on; answers under way go on.

        They wait while it is loaded. Kept rows are forgotten. With the match rule texts are the same.

        Raises:
            ValueError: the folder cannot be loaded or drafts otherwise, or the engine's drafter is of no folder, or in
                another process; nothing has changed then.
        """
        if self._loads is None or self.speculation.draft is None:
            raise ValueError("swap_drafter: the engine needs a drafter from a folder (draft), without draft_device")
        with self._scheduler.exclusive():  # models are built with another default dtype, which is the whole process's
            before, drafter = self.drafter, self._loads(str(draft))
            self.speculation = self.speculation.swapped(before, drafter, str(draft))
            self._scheduler.batch = self.new_batch(drafter=drafter, kept_rows=self._kept_rows)
            self.drafter = drafter
        before.close()

    def close(self) -> None:
        """Ends the drafter's process, if any; `with load(…) as engine` calls it."""
        self.drafter.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, prompts: str | Sequence[int], *, max_new_tokens: int = 128, sampling: Sampling = GREEDY, stop: Stop = None
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: Stop = None,
        batch_size: int = 8,
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Prompts,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: Stop = None,
        batch_size: int = 8,
    ) -> Result | list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Prompts,
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop: Stop = None,
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
        if whole_number("batch_size", batch_size) < 1:
            raise ValueError(f"batch_size={batch_size}: use at least 1")
        answers = self._answers.whole(requests, stop, most=batch_size)
        return answers[0] if is_one else answers

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: Stop = None,
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
        self, prompt: Prompt, *, max_new_tokens: int = 128, sampling: Sampling = GREEDY, stop: Stop = None
    ) -> Generator[Chunk, None, None]:
        """Answers one prompt as a stream of chunks, whose texts joined are the `text` that `generate` returns.

        Text that a later token may still change, half a character or the beginning of a stop string, comes with that
        token.

        Raises:
            ValueError: as `generate`.
        """
        (request,) = requests_of(self.target, [prompt], max_new_tokens, sampling)
        return self._answers.streamed(request, stop)

    def astream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        stop: Stop = None,
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
        check_round(self.speculation, k, logprobs)
        request = replace(request, k=k, logprobs=logprobs)
        return self._answers.astreamed(request, stop)

    async def agenerate(
        self, prompt: Prompt, *, max_new_tokens: int = 128, sampling: Sampling = GREEDY, stop: Stop = None
    ) -> Result:
        """`generate` of one prompt for an event loop, with its errors; see `astream`."""
        (request,) = requests_of(self.target, [prompt], max_new_tokens, sampling)
        return await self._answers.awhole(request, stop)

    @contextmanager
    def in_round(self) -> Iterator[None]:
        """Sets CPU affinity and torch's threads for rounds: one thread if all passes are in C++, which has a pool."""
        is_native = all(lm.is_native for lm in (self.target.lm, *self.drafter.models))
        threads = nullcontext() if self._cpus is None else torch_threads(len(self._cpus))
        with on_cpus(self._cpus), one_torch_thread() if is_native else threads:
            yield

    def warm_up(self, batch_size: int = 1) -> None:
        """Runs the passes of decoding once, so that none is compiled or recorded during an answer."""
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
        ahead: dict[str, Any] = {} if self.speculation.gamma is None else {"overlap": self.speculation.overlap}
        return (kind or (AheadBatch if ahead else Batch))(
            target or self.target,
            drafter or self.drafter,
            lengths=lengths or self.lengths,
            rule=self.speculation.verify,
            tree=self.speculation.tree,
            verify=verify,
            keeps_finished=keeps_finished,
            kept_rows=kept_rows,
            **ahead,
        )

    def check(
        self,
        prompts: Prompt | Prompts,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop: Stop = None,
        k: int | None = None,
        logprobs: int | None = None,
    ) -> None:
        """Raises the ValueError that `generate` or `astream` would, without answering."""
        check_round(self.speculation, k, logprobs)
        requests_of(self.target, rows_of(prompts)[0], max_new_tokens, sampling)
        self._answers.stop_strings(stop)

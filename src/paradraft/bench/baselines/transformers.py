"""Runs `generate` of `transformers` as a baseline: plain, with an assistant, and with prompt lookup."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from paradraft.bench.hardware.roofline import plain_passes
from paradraft.bench.result import Answerer, BatchResult, PeerCounts
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import encode_prompt


def plain(target: Target) -> Answerer:
    """An answerer by `generate`, for batches too."""
    return _answerer(target, {})


def assisted(target: Target, draft: PreTrainedModel, *, k: int, confidence: float) -> Answerer:
    """An answerer by assisted generation, for one prompt at a time.

    Args:
        draft: an ordinary draft model; its generation config stays as it is.
        k: most tokens drafted per round.
        confidence: drafting stops after a token less likely than this; 0 drafts k tokens. Where
            scikit-learn is installed, `transformers` adapts it during a run.
    """
    logging.getLogger("transformers.generation.utils").addFilter(_is_no_advice)
    # `transformers` reads these three settings from the draft model alone, which other methods share.
    assistant = copy.copy(draft)
    assistant.generation_config = copy.deepcopy(draft.generation_config)
    assistant.generation_config.update(
        num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=confidence
    )
    return _answerer(target, {}, assistant=assistant)


def prompt_lookup(target: Target, *, k: int) -> Answerer:
    """An answerer by prompt lookup, for one prompt at a time; searches for the last two tokens, else for the last."""
    return _answerer(target, {"prompt_lookup_num_tokens": k})


def _answerer(target: Target, settings: dict[str, object], assistant: PreTrainedModel | None = None) -> Answerer:
    model, tokenizer = target.lm.model, target.tokenizer
    eos_ids = sorted(target.eos_ids)
    drafts = assistant is not None or bool(settings)

    def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
        chosen: dict[str, object] = {"do_sample": False}
        if not sampling.is_greedy:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        torch.manual_seed(sampling.seed)
        rows = [encode_prompt(prompt, tokenizer) for prompt in prompts]
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=eos_ids or None, pad_token_id=0, **chosen, **settings
        )
        rounds = _Rounds()
        with _widths(model, rounds.widths) if drafts else nullcontext():
            began_s = time.perf_counter()
            answered = model.generate(
                tokens, attention_mask=mask, generation_config=config, assistant_model=assistant, streamer=rounds
            )[:, width:].tolist()
            total_s = time.perf_counter() - began_s
        answers = [up_to_end(row, eos_ids) for row in answered]
        arrived_s = [moment_s - began_s for moment_s in rounds.moments_s]
        if not drafts:
            passes = plain_passes(len(rows), width, len(answered[0]))
            # Each pass gives every row a token; those after the end of an answer are padding.
            delivered_s = [arrived_s[: len(answer)] for answer in answers]
            return BatchResult(tokens=answers, total_s=total_s, stats=None, passes=passes, delivered_s=delivered_s)
        drafted = [wide - 1 for wide in [rounds.widths[0] - width + 1, *rounds.widths[1:]]]
        counts = PeerCounts.of(len(answers[0]), drafted, rounds.accepted)
        return BatchResult(
            tokens=answers, total_s=total_s, stats=None, counts=counts, accepted=[rounds.accepted],
            delivered_s=[arrived_s],
        )  # fmt: skip

    return answer


def _is_no_advice(record: logging.LogRecord) -> bool:
    """Filters out the advice of `transformers` on its own call of the assistant."""
    return not record.getMessage().startswith("Passing `generation_config` together with")


class _Rounds(BaseStreamer):
    """Records the new tokens of each round, and the tokens that each pass of the target reads.

    `generate` hands tokens over on the host, so a GPU has been synchronized, as it is in each step without a streamer.
    """

    def __init__(self) -> None:
        self.widths: list[int] = []
        self._sizes: list[int] = []
        self._moments_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self._sizes.append(value.numel())
        self._moments_s.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def accepted(self) -> list[int]:
        """For each round, how many of its tokens were drafted. The first call has the prompt."""
        return [size - 1 for size in self._sizes[1:]]

    @property
    def moments_s(self) -> list[float]:
        """For each round, when its tokens came."""
        return self._moments_s[1:]


@contextmanager
def _widths(model: PreTrainedModel, widths: list[int]) -> Iterator[None]:
    """Records how many tokens each pass of a model reads."""

    def note(_: torch.nn.Module, __: tuple[object, ...], arguments: dict[str, torch.Tensor]) -> None:
        widths.append(arguments["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def up_to_end(tokens: list[int], eos_ids: list[int]) -> list[int]:
    """An answer without the padding after its end.

    >>> up_to_end([5, 6, 2, 0, 0], [2])
    [5, 6, 2]
    """
    ends = [index + 1 for index, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0]] if ends else tokens

"""For `transformers`: `model.generate(**inputs, custom_generate=paradraft.custom_generate, drafter="pard", …)`.

`generate` prepares what it was asked for, and this decodes: greedily it gives what `generate` gives without it, and
when sampling the seeded text of `Engine`. What it cannot serve is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput, MinPLogitsWarper
from transformers.generation.streamers import BaseStreamer

from paradraft.core import Request
from paradraft.decode.batch import run
from paradraft.decode.generation import Generation
from paradraft.drafters import load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import AUTO, Speculation
from paradraft.errors import one_line, whole_number
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling_params import LogitsProcessor, Sampling
from paradraft.sources.loading import load_tokenizer

WARPERS = {
    TemperatureLogitsWarper: ("temperature", (None, 1.0)), TopKLogitsWarper: ("top_k", (None, 0)),
    TopPLogitsWarper: ("top_p", (None, 1.0)), MinPLogitsWarper: ("min_p", (None,)),
}  # fmt: skip
"""What `Sampling` does by itself: the setting for which `generate` adds each, and with which values it does not."""
STATEFUL = (
    PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)  # fmt: skip
"""Processors that are no function of a text and its logits."""
OF_PROMPTS = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)
"""Processors that know all prompts of a batch, and so serve no row of one alone."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1), "penalty_alpha": (None,), "dola_layers": (None,), "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,), "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0), "top_h": (None,), "output_scores": (None, False), "output_logits": (None, False),
    "output_attentions": (None, False), "output_hidden_states": (None, False), "constraints": (None,),
    "force_words_ids": (None,),
}  # fmt: skip
"""Settings that cannot be served, and what they are where nothing is asked for."""
PREPARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position")
"""What `generate` prepares for a model's forward, and nobody has asked for."""
OURS = "_paradraft_engines"
"""The attribute of a model that holds its engines."""


class Engines:
    """The engines of a model, as an attribute of it; copies of the model and its pickles have none.

    Args:
        weights: where the weights were when the engines were made, and how often they had changed.
    """

    def __init__(self, weights: tuple[tuple[int, int], ...] = ()) -> None:
        self.weights = weights
        self.engines: dict[Speculation, Engine] = {}

    def __reduce__(self) -> tuple[type[Engines], tuple[()]]:
        return Engines, ()


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    drafter: str = "none",
    draft_model: str | None = None,
    k: int = 8,
    lengths: str = AUTO,
    seed: int | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decodes for `generate` of `transformers`, which calls it.

    The first call for a model prepares its passes, and later ones use them; a model that has learnt since is prepared
    again. Stopping criteria are asked about every new token, and are given None for scores.

    Args:
        model: a causal LM of an architecture that paradraft serves, from a folder or a Hugging Face id.
        input_ids: `[B, L]` prompts, padded on the left.
        logits_processor: functions of a text and its logits.
        stopping_criteria: those of `generate`, and the user's.
        generation_config: of this call.
        synced_gpus: must be False.
        streamer: gets the tokens of one prompt, where `transformers` hands it over (5.23 does not).
        drafter: one of `drafter_names()`, with settings or without.
        draft_model: its folder or Hugging Face id.
        k: most tokens drafted per round.
        lengths: how many of them to draft, see `paradraft.load`.
        seed: of the first row, when sampling; the next rows have the next ones. None takes it from torch's generator.
        model_kwargs: what `generate` prepares for the model; the attention mask is read.

    Returns:
        `[B, L + N]` prompts and answers, padded on the right; in a `GenerateDecoderOnlyOutput` if asked for.

    Raises:
        ValueError: something is asked for that cannot be served.
    """
    _check(generation_config, logits_processor, synced_gpus, streamer, model_kwargs, len(input_ids))
    if torch.is_autocast_enabled(input_ids.device.type):
        raise ValueError("custom_generate: torch.autocast cannot be served: load the model in the dtype it is to have")
    engine = _engine_of(model, Speculation(drafter=drafter, draft=draft_model, k=k, lengths=lengths))
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        wanted, given = tuple(input_ids.shape), tuple(mask.shape)
        raise ValueError(f"custom_generate: attention_mask of shape {given}: use {wanted}, that of input_ids")
    pads = [0] * len(input_ids) if mask is None else (mask == 0).sum(1).tolist()
    _check_rows(mask, model_kwargs.get("position_ids"), pads, input_ids.shape[1])
    if seed is None:
        seed = int(torch.randint(2**31, ())) if generation_config.do_sample else 0
    seed = whole_number("seed", seed)
    rows = input_ids.tolist()
    generations = []
    for number, (row, pad) in enumerate(zip(rows, pads, strict=True)):
        asked = _sampling(generation_config, logits_processor, tuple(row[:pad]), seed + number)
        most = generation_config.max_length or engine.target.capacity + pad
        if (wanted := max(most, len(row) + 1) - pad) > engine.target.capacity:
            raise ValueError(
                f"custom_generate: the model has room for {engine.target.capacity} tokens, and {wanted} are asked for "
                "with the prompt: ask for less"
            )
        ends = _ends(generation_config)
        request = Request(id=number, tokens=row[pad:], sampling=asked, max_new_tokens=most - len(row), eos_ids=ends)
        generations.append(Generation(request))
    answers = _decoded(engine, generations, rows, stopping_criteria, input_ids.device, streamer)
    return _joined(input_ids, answers, generation_config)


def _check(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    synced_gpus: bool,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    batch_size: int,
) -> None:
    """Raises ValueError for what cannot be served."""
    for name, neutral in NEUTRAL.items():
        if name.startswith("output_") and not config.return_dict_in_generate:
            continue
        if (value := getattr(config, name, None)) not in neutral and (config.do_sample or not _is_of_sampling(name)):
            raise ValueError(f"custom_generate: {name}={one_line(value)} cannot be served: leave it out")
    if (found := next((one for one in processors if isinstance(one, STATEFUL)), None)) is not None:
        raise ValueError(
            f"custom_generate: {type(found).__name__} is no function of a text and its logits, and cannot be served"
        )
    if batch_size > 1 and (found := next((one for one in processors if isinstance(one, OF_PROMPTS)), None)) is not None:
        raise ValueError(f"custom_generate: {type(found).__name__} serves one prompt, and there are {batch_size}")
    if config.do_sample and any(isinstance(one, WatermarkLogitsProcessor) for one in processors):
        raise ValueError("custom_generate: watermarking_config cannot be served when sampling: leave it out")
    if synced_gpus:
        raise ValueError("custom_generate: synced_gpus=True cannot be served: leave it out")
    if streamer is not None and batch_size > 1:
        raise ValueError(f"custom_generate: a streamer gets one prompt, and there are {batch_size}")
    unknown = model_kwargs.keys() - {*PREPARED}
    if unknown:
        raise ValueError(f"custom_generate: {min(unknown)} cannot be served: leave it out")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise ValueError("custom_generate: past_key_values cannot be served: an engine of paradraft keeps rows itself")


def _check_rows(mask: Tensor | None, positions: Tensor | None, pads: list[int], length: int) -> None:
    """Raises ValueError for rows whose tokens do not follow each other from after the padding to the end."""
    for number, pad in enumerate(pads):
        if pad == length:
            raise ValueError(f"custom_generate: prompt {number} is empty: give it at least one token")
        if mask is not None and not mask[number, pad:].all():
            raise ValueError("custom_generate: prompts must be padded on the left: set tokenizer.padding_side='left'")
        if positions is not None and not (positions[number % len(positions), pad:].diff() == 1).all():
            raise ValueError("custom_generate: position_ids other than one after the other cannot be served")


def _is_of_sampling(name: str) -> bool:
    return name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def _engine_of(model: PreTrainedModel, speculation: Speculation) -> Engine:
    """The engine for a model as it is now.

    As in `generate`, every row of the embedding is a token, those that only fill it up too.
    """
    weights = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    kept = getattr(model, OURS, None)
    if kept is None or kept.weights != weights:
        kept = Engines(weights)
    if speculation not in kept.engines:
        if not model.config.name_or_path:
            raise ValueError("custom_generate: this model is from no folder, so its tokenizer cannot be found: save it")
        if (attention := model.config._attn_implementation) not in ("sdpa", "eager"):
            raise ValueError(f"custom_generate: attention {attention!r} has no masks of trees: use sdpa")
        name = str(model.dtype).removeprefix("torch.")
        runtime = Runtime(device=str(model.device), dtype=name, width=speculation.pass_width)
        tokenizer = load_tokenizer(model.config.name_or_path)
        lm = CausalLM(model, vocab_size=model.config.vocab_size, width=runtime.width)
        target = Target(lm, tokenizer)
        drafter = load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=runtime)
        kept.engines[speculation] = Engine(target, drafter, speculation)
    setattr(model, OURS, kept)
    return kept.engines[speculation]


def _ends(config: GenerationConfig) -> frozenset[int]:
    ids = config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


@dataclass(frozen=True)
class _Padded:
    """A processor that sees a text as `generate` would show it: with what fills the row up before it."""

    processor: LogitsProcessor
    pads: tuple[int, ...]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        before = torch.tensor([self.pads], dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
        return self.processor(torch.cat([before, ids], dim=1), scores)


def _of_row(processor: LogitsProcessor, padding: int) -> LogitsProcessor:
    """A processor for one row, where `generate` has told it how each row is padded."""
    if not isinstance(processor, RepetitionPenaltyLogitsProcessor):
        return processor
    if not isinstance(processor.prompt_ignore_length, Tensor):
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=padding)


def _without_own_warpers(config: GenerationConfig, processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors without those that `Sampling` does by itself.

    `generate` adds one of a kind for its own settings, after all others; the user's of the same kind stay.
    """
    left = LogitsProcessorList(processors)
    for kind, (name, neutral) in WARPERS.items():
        if config.do_sample and getattr(config, name) not in neutral:
            for one in [one for one in left if isinstance(one, kind)][-1:]:
                left.remove(one)
    return left


def _sampling(config: GenerationConfig, processors: LogitsProcessorList, pads: tuple[int, ...], seed: int) -> Sampling:
    asked = [_of_row(one, len(pads)) for one in _without_own_warpers(config, processors)]
    kept = tuple(_Padded(one, pads) if pads else one for one in asked)
    if not config.do_sample:
        return Sampling(processors=kept)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        processors=kept,
        seed=seed,
    )


def _decoded(
    engine: Engine,
    generations: Sequence[Generation],
    rows: Sequence[list[int]],
    criteria: StoppingCriteriaList,
    device: torch.device,
    streamer: BaseStreamer | None,
) -> list[list[int]]:
    """The new tokens of each row, cut where a criterion says so."""
    answers: list[list[int]] = [[] for _ in generations]
    is_cut = [False] * len(generations)
    batch = engine.new_batch()
    with engine.in_round():
        for output in run(batch, generations):
            for number, tokens in zip(output.requests, output.tokens, strict=True):
                for token in [] if is_cut[number] else tokens:
                    answers[number].append(token)
                    text = torch.tensor([rows[number] + answers[number]], device=device)
                    if streamer is not None:
                        streamer.put(text[0, -1:].cpu())
                    if any(bool(torch.as_tensor(one(text, None)).all()) for one in criteria):
                        is_cut[number] = True
                        break
            ended = [one for one in batch.generations if is_cut[one.request.id] and not one.is_finished]
            for generation in ended:
                generation.finish_reason = "stop"
            if ended and all(one.is_finished for one in batch.generations):
                batch.clear()
    if streamer is not None:
        streamer.end()
    return answers


def _joined(
    input_ids: Tensor, answers: list[list[int]], config: GenerationConfig
) -> GenerateDecoderOnlyOutput | Tensor:
    filler: Any = getattr(config, "_pad_token_tensor", None)
    most = max(map(len, answers))
    fill = 0 if filler is None else int(filler)
    new = torch.tensor([answer + [fill] * (most - len(answer)) for answer in answers], device=input_ids.device)
    sequences = torch.cat([input_ids, new.to(input_ids.dtype)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

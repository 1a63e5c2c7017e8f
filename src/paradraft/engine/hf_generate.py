"""For `transformers`: `model.generate(**inputs, custom_generate=paradraft.custom_generate, drafter="pard", …)`.

`generate` prepares the inputs and this function decodes: greedy output equals that of `generate` alone, sampled output
is the seeded text of `Engine`. Settings that cannot be served are refused.
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
from paradraft.models.target import Target
from paradraft.sampling_params import LogitsProcessor, Sampling
from paradraft.sources.load_plan import runtime_of
from paradraft.sources.loading import load_tokenizer

WARPERS = {
    TemperatureLogitsWarper: ("temperature", (None, 1.0)), TopKLogitsWarper: ("top_k", (None, 0)),
    TopPLogitsWarper: ("top_p", (None, 1.0)), MinPLogitsWarper: ("min_p", (None,)),
}  # fmt: skip
"""Warpers that `Sampling` replaces: the setting that makes `generate` add each, and its neutral values."""
STATEFUL = (
    PrefixConstrainedLogitsProcessor, SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)  # fmt: skip
"""Logits processors that are no function of a text and its logits."""
OF_PROMPTS = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)
"""Logits processors that need all prompts of a batch, so they cannot run on single rows."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1), "penalty_alpha": (None,), "dola_layers": (None,), "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,), "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0), "top_h": (None,), "output_scores": (None, False), "output_logits": (None, False),
    "output_attentions": (None, False), "output_hidden_states": (None, False), "constraints": (None,),
    "force_words_ids": (None,),
}  # fmt: skip
"""Settings that cannot be served, and their neutral values."""
PREPARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position")
"""Arguments of a model's forward that `generate` adds by itself."""
OURS = "_paradraft_engines"
"""The attribute of a model that holds its engines."""


class Engines:
    """Engines of a model, kept as its attribute; copies and pickles of the model get none.

    `weights` are the address and version counter of each weight when the engines were built.
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

    The first call builds an engine for the model, later calls reuse it until the weights change. Stopping criteria run
    after every new token and get None for scores.

    Args:
        model: a causal LM of an architecture that paradraft serves, from a folder or a Hugging Face id.
        input_ids: `[B, L]` prompts, padded on the left.
        synced_gpus: must be False.
        streamer: gets the tokens of one prompt, if `transformers` passes it on (5.23 does not).
        drafter, draft_model, k, lengths: see `paradraft.load`.
        seed: of the first row when sampling; row i uses seed + i. None draws it from torch's generator.
        model_kwargs: inputs that `generate` prepares for the model; the attention mask is read, positions are checked.

    Returns:
        `[B, L + N]` prompts and answers, padded on the right; a `GenerateDecoderOnlyOutput` with
        `return_dict_in_generate`.

    Raises:
        ValueError: a setting cannot be served.
    """
    _check(generation_config, logits_processor, synced_gpus, streamer, model_kwargs, len(input_ids))
    if torch.is_autocast_enabled(input_ids.device.type):
        raise ValueError("custom_generate: torch.autocast cannot be served: load the model in the dtype it is to have")
    engine = _engine_of(model, Speculation(drafter=drafter, draft=draft_model, k=k, lengths=lengths))
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        shape, mask_shape = tuple(input_ids.shape), tuple(mask.shape)
        raise ValueError(f"custom_generate: attention_mask of shape {mask_shape}: use {shape}, that of input_ids")
    pads = [0] * len(input_ids) if mask is None else (mask == 0).sum(1).tolist()
    _check_rows(mask, model_kwargs.get("position_ids"), pads, input_ids.shape[1])
    if seed is None:
        seed = int(torch.randint(2**31, ())) if generation_config.do_sample else 0
    seed = whole_number("seed", seed)
    rows = input_ids.tolist()
    capacity = engine.target.capacity
    generations = [
        Generation(_request(index, row, pad, capacity, generation_config, logits_processor, seed))
        for index, (row, pad) in enumerate(zip(rows, pads, strict=True))
    ]
    answers = _decoded(engine, generations, rows, stopping_criteria, input_ids.device, streamer)
    return _joined(input_ids, answers, generation_config)


def _request(
    index: int,
    row: list[int],
    pad: int,
    capacity: int,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    seed: int,
) -> Request:
    """Request of a row with `pad` padding tokens; raises ValueError if its answer does not fit."""
    max_length = config.max_length or capacity + pad
    if (length := max(max_length, len(row) + 1) - pad) > capacity:
        raise ValueError(
            f"custom_generate: the model has room for {capacity} tokens, and {length} are asked for with the prompt: "
            "ask for less"
        )
    return Request(
        id=index, tokens=row[pad:], sampling=_sampling(config, processors, tuple(row[:pad]), seed + index),
        max_new_tokens=max_length - len(row), eos_ids=_eos_ids(config),
    )  # fmt: skip


def _check(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    synced_gpus: bool,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    batch_size: int,
) -> None:
    for name, neutral in NEUTRAL.items():
        if name.startswith("output_") and not config.return_dict_in_generate:
            continue
        if (value := getattr(config, name, None)) not in neutral and (config.do_sample or not _is_of_sampling(name)):
            raise ValueError(f"custom_generate: {name}={one_line(value)} cannot be served: leave it out")
    if (stateful := next((each for each in processors if isinstance(each, STATEFUL)), None)) is not None:
        raise ValueError(
            f"custom_generate: {type(stateful).__name__} is no function of a text and its logits, and cannot be served"
        )
    of_prompts = next((each for each in processors if isinstance(each, OF_PROMPTS)), None)
    if batch_size > 1 and of_prompts is not None:
        raise ValueError(f"custom_generate: {type(of_prompts).__name__} serves one prompt, and there are {batch_size}")
    if config.do_sample and any(isinstance(each, WatermarkLogitsProcessor) for each in processors):
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
    """Raises ValueError unless each row is padding on the left, then tokens at consecutive positions."""
    for row, pad in enumerate(pads):
        if pad == length:
            raise ValueError(f"custom_generate: prompt {row} is empty: give it at least one token")
        if mask is not None and not mask[row, pad:].all():
            raise ValueError("custom_generate: prompts must be padded on the left: set tokenizer.padding_side='left'")
        if positions is not None and not (positions[row % len(positions), pad:].diff() == 1).all():
            raise ValueError("custom_generate: position_ids other than one after the other cannot be served")


def _is_of_sampling(name: str) -> bool:
    return name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def _engine_of(model: PreTrainedModel, speculation: Speculation) -> Engine:
    """Engine for the model's current weights, cached on the model.

    As in `generate`, every row of the embedding counts as a token, padding rows too.
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
        runtime = runtime_of(model, width=speculation.pass_width)
        tokenizer = load_tokenizer(model.config.name_or_path)
        lm = CausalLM(model, vocab_size=model.config.vocab_size, width=runtime.width)
        target = Target(lm, tokenizer)
        drafter = load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=runtime)
        kept.engines[speculation] = Engine(target, drafter, speculation)
    setattr(model, OURS, kept)
    return kept.engines[speculation]


def _eos_ids(config: GenerationConfig) -> frozenset[int]:
    ids = config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


@dataclass(frozen=True)
class _Padded:
    """Logits processor that sees the row as in `generate`: with its left padding."""

    processor: LogitsProcessor
    pads: tuple[int, ...]

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        padding = torch.tensor([self.pads], dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
        return self.processor(torch.cat([padding, ids], dim=1), scores)


def _of_row(processor: LogitsProcessor, padding: int) -> LogitsProcessor:
    """Repetition penalty with the padding of one row instead of all rows'."""
    if not isinstance(processor, RepetitionPenaltyLogitsProcessor):
        return processor
    if not isinstance(processor.prompt_ignore_length, Tensor):
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=padding)


def _without_own_warpers(config: GenerationConfig, processors: LogitsProcessorList) -> LogitsProcessorList:
    """Drops the warpers that `Sampling` replaces.

    `generate` appends one per setting after all others, so only the last of a kind goes: the user's own stay.
    """
    kept = LogitsProcessorList(processors)
    for kind, (name, neutral) in WARPERS.items():
        if config.do_sample and getattr(config, name) not in neutral:
            for warper in [each for each in kept if isinstance(each, kind)][-1:]:
                kept.remove(warper)
    return kept


def _sampling(config: GenerationConfig, processors: LogitsProcessorList, pads: tuple[int, ...], seed: int) -> Sampling:
    of_row = [_of_row(each, len(pads)) for each in _without_own_warpers(config, processors)]
    padded = tuple(_Padded(each, pads) if pads else each for each in of_row)
    if not config.do_sample:
        return Sampling(processors=padded)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        processors=padded,
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
    """New tokens of each row, cut after the token at which a stopping criterion fires."""
    answers: list[list[int]] = [[] for _ in generations]
    is_cut = [False] * len(generations)
    batch = engine.new_batch()
    with engine.in_round():
        for output in run(batch, generations):
            for row, tokens in zip(output.requests, output.tokens, strict=True):
                for token in [] if is_cut[row] else tokens:
                    answers[row].append(token)
                    text = torch.tensor([rows[row] + answers[row]], device=device)
                    if streamer is not None:
                        streamer.put(text[0, -1:].cpu())
                    if any(bool(torch.as_tensor(criterion(text, None)).all()) for criterion in criteria):
                        is_cut[row] = True
                        break
            stopped = [each for each in batch.generations if is_cut[each.request.id] and not each.is_finished]
            for generation in stopped:
                generation.finish_reason = "stop"
            if stopped and all(each.is_finished for each in batch.generations):
                batch.clear()
    if streamer is not None:
        streamer.end()
    return answers


def _joined(
    input_ids: Tensor, answers: list[list[int]], config: GenerationConfig
) -> GenerateDecoderOnlyOutput | Tensor:
    pad_tensor: Any = getattr(config, "_pad_token_tensor", None)
    longest = max(map(len, answers))
    pad_id = 0 if pad_tensor is None else int(pad_tensor)
    new = torch.tensor([answer + [pad_id] * (longest - len(answer)) for answer in answers], device=input_ids.device)
    sequences = torch.cat([input_ids, new.to(input_ids.dtype)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

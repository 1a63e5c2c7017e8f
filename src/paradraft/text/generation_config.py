"""A model's `generation_config`: EOS ids, suppressed tokens, sampling defaults, and a warning for ignored settings.

`generate` of `transformers` reads these settings from the model. Here every request sets temperature, top-k, top-p,
min-p, the repetition penalty and the length (`Sampling`, `max_new_tokens`); the model's values are the defaults of
`chat` and `serve` (`sampling_defaults`). `eos_token_id` and `suppress_tokens` are obeyed. All other settings that
change texts are ignored, with a warning.
"""

from __future__ import annotations

import reprlib
from typing import Any

from transformers import GenerationConfig

from paradraft.sampling_params import Sampling

IGNORED: dict[str, tuple[object, ...]] = {
    # logits
    "guidance_scale": (1,),
    "sequence_bias": ({}, []),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],),
    "watermarking_config": (),
    # ends
    "max_time": (),
    "stop_strings": ([], ""),
    "is_assistant": (False,),
    # other ways to decode
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "assistant_ensemble_weight": (),
    "token_healing": (False,),
}
"""Settings that change texts in `generate` and are ignored here, each with its neutral values besides None."""
IGNORED_IF_SAMPLED: dict[str, tuple[object, ...]] = {
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""The same for settings that `generate` reads only with `do_sample`."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""Sampling settings, which are fields of `Sampling` under the same names."""
GIVEN_OR_OBEYED = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_length", "max_new_tokens",
    "eos_token_id", "suppress_tokens",
)  # fmt: skip
"""Settings that every request sets, and settings that are obeyed."""
NO_MATTER = (
    # of beams only, of models with an encoder, of prompts that are empty, of rows that have ended
    "early_stopping", "length_penalty", "decoder_start_token_id", "bos_token_id", "pad_token_id",
    # the same distribution: speculative decoding of their own
    "renormalize_logits", "use_mtp", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_early_exit",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "speculation_type",
    # how it is computed and what is returned
    "use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "continuous_batching_config",
    "low_memory", "prefill_chunk_size", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "transformers_version",
)  # fmt: skip
"""Settings that do not change texts."""


class PenaltyWarning(UserWarning):
    """A model's generation config has a repetition penalty, which requests must set to apply it."""


def end_ids(config: GenerationConfig, name: str = "the model") -> frozenset[int]:
    """The EOS ids, as `generate` reads them.

    Where a model has no `generation_config.json`, `transformers` fills its generation config from `config.json`. Where
    it has one without `eos_token_id`, no token ends a text. Raises ValueError if it is neither an id nor a list of ids.

    Example:
        >>> sorted(end_ids(GenerationConfig(eos_token_id=[7, 2]))), sorted(end_ids(GenerationConfig()))
        ([2, 7], [])
    """
    setting = config.eos_token_id
    return frozenset(_token_ids([setting] if type(setting) is int else setting, "eos_token_id", name))


def suppressed_ids(config: GenerationConfig, name: str = "the model") -> frozenset[int]:
    """The tokens that are never chosen (`suppress_tokens`); raises ValueError if that is no list of token ids.

    Example:
        >>> sorted(suppressed_ids(GenerationConfig(suppress_tokens=[3, -1, 5])))
        [3, 5]
    """
    # `generate` skips negative ids too.
    return frozenset(token for token in _token_ids(config.suppress_tokens, "suppress_tokens", name) if token >= 0)


def sampling_defaults(config: GenerationConfig, name: str = "the model") -> dict[str, float]:
    """The model's defaults for fields of `Sampling` that a request does not set.

    As in vLLM, settings count also without `do_sample`, and the temperature is 1 where only others are set. With
    `do_sample: false` texts are greedy. Raises ValueError for settings out of range or of the wrong type.

    Example:
        >>> sampling_defaults(GenerationConfig(do_sample=True, top_p=0.8, repetition_penalty=1.1))
        {'temperature': 1.0, 'top_p': 0.8, 'repetition_penalty': 1.1}
        >>> sampling_defaults(GenerationConfig(do_sample=False, temperature=0.6)), sampling_defaults(GenerationConfig())
        ({'temperature': 0.0}, {})
    """
    defaults = {key: value for key in SAMPLED if (value := getattr(config, key)) is not None}
    if config.do_sample is False:
        defaults = {"temperature": 0.0}
    elif defaults or config.do_sample:
        defaults = {"temperature": 1.0} | defaults
    if config.repetition_penalty is not None:
        defaults["repetition_penalty"] = config.repetition_penalty
    try:
        Sampling(**defaults)
    except ValueError as error:
        raise ValueError(f"{name}: in its generation config {error}") from None
    return defaults


def ignored_settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings that change texts in `generate` and are ignored here, with their values.

    Settings that a later version of `transformers` has added are among them, unless they have their default value.

    Example:
        >>> ignored_settings(GenerationConfig(num_beams=4, no_repeat_ngram_size=0, temperature=0.6, typical_p=0.9))
        {'num_beams': 4}
    """
    watched = IGNORED | (IGNORED_IF_SAMPLED if config.do_sample else {})
    known = {*GIVEN_OR_OBEYED, *NO_MATTER, *IGNORED, *IGNORED_IF_SAMPLED, "cache_implementation"}
    added = {key: (value,) for key, value in vars(GenerationConfig()).items() if key not in known and key[0] != "_"}
    values = {key: getattr(config, key, None) for key in watched | added}
    values = {key: value for key, value in values.items() if value is not None and value not in (watched | added)[key]}
    if config.cache_implementation == "quantized":  # other caches hold the exact keys and values
        values["cache_implementation"] = config.cache_implementation
    return values


def complaint(config: GenerationConfig) -> str | None:
    """The warning about ignored settings; None without any.

    Example:
        >>> complaint(GenerationConfig(num_beams=4, min_length=3))
        'its generation_config asks for min_length=3, num_beams=4, which is ignored'
    """
    ignored = ignored_settings(config)
    values = {key: value.to_dict() if hasattr(value, "to_dict") else value for key, value in ignored.items()}
    settings = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in values.items())
    return f"its generation_config asks for {settings}, which is ignored" if settings else None


def penalty_complaint(config: GenerationConfig) -> str | None:
    """The warning about a repetition penalty, which `generate` applies also to greedy decoding; None without one.

    Example:
        >>> penalty_complaint(GenerationConfig(repetition_penalty=1.1))
        'its generation_config asks for repetition_penalty=1.1, which only chat and serve obey unasked'
    """
    penalty = config.repetition_penalty
    warning = f"its generation_config asks for repetition_penalty={penalty}, which only chat and serve obey unasked"
    return None if penalty in (None, 1) else warning


def _token_ids(value: object, setting: str, name: str) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or any(type(token) is not int for token in value):
        raise ValueError(f"{name}: {setting} is {value!r} in its generation config, where token ids belong")
    return list(value)

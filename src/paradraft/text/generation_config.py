"""What a model's `generation_config` asks for: where its texts end, what is obeyed here, and what is ignored.

`generate` of `transformers` reads these settings from the model. Here temperature, top-k, top-p, min-p, the repetition
penalty and the length are given with every request (`Sampling`, `max_new_tokens`); what the model asks for is the
default of `chat` and `serve` (`sampling_defaults`). The ends of a text and `suppress_tokens` are obeyed. All other
settings that change texts are ignored, which is worth a warning.
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
"""Settings that `generate` obeys, that change texts, and that are ignored here; with their neutral values, besides
None."""
IGNORED_IF_SAMPLED: dict[str, tuple[object, ...]] = {
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""The same for settings that `generate` reads only where `do_sample` is set."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""Settings of chance, which are fields of `Sampling` under the same names."""
GIVEN_OR_OBEYED = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_length", "max_new_tokens",
    "eos_token_id", "suppress_tokens",
)  # fmt: skip
"""Settings that every request gives, and those that are obeyed."""
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
    """A model asks for a repetition penalty, and whoever loads it must give it with requests."""


def end_ids(config: GenerationConfig, name: str = "the model") -> frozenset[int]:
    """The tokens that end a text, as `generate` finds them.

    Where a model has no `generation_config.json`, `transformers` fills its generation config from `config.json`. Where
    it has one without `eos_token_id`, no token ends a text.

    Args:
        config: of the model.
        name: of the model, for the message.

    Raises:
        ValueError: `eos_token_id` is neither a token id nor a list of them.

    Example:
        >>> sorted(end_ids(GenerationConfig(eos_token_id=[7, 2]))), sorted(end_ids(GenerationConfig()))
        ([2, 7], [])
    """
    found = config.eos_token_id
    return frozenset(_token_ids([found] if type(found) is int else found, "eos_token_id", name))


def suppressed_ids(config: GenerationConfig, name: str = "the model") -> frozenset[int]:
    """The tokens that are never chosen (`suppress_tokens`).

    Raises:
        ValueError: it is not a list of token ids.

    Example:
        >>> sorted(suppressed_ids(GenerationConfig(suppress_tokens=[3, -1, 5])))
        [3, 5]
    """
    # `generate` passes over ids that are no tokens.
    return frozenset(token for token in _token_ids(config.suppress_tokens, "suppress_tokens", name) if token >= 0)


def sampling_defaults(config: GenerationConfig, name: str = "the model") -> dict[str, float]:
    """How tokens are chosen where a request does not say: fields of `Sampling`, as far as the model asks for them.

    As in vLLM a setting counts also without `do_sample`, and nothing but what the model's file has: where it has no
    temperature, that is 1. With `do_sample: false` texts are greedy.

    Args:
        config: of the model.
        name: of the model, for the message.

    Raises:
        ValueError: a setting is out of range or has the wrong type.

    Example:
        >>> sampling_defaults(GenerationConfig(do_sample=True, top_p=0.8, repetition_penalty=1.1))
        {'temperature': 1.0, 'top_p': 0.8, 'repetition_penalty': 1.1}
        >>> sampling_defaults(GenerationConfig(do_sample=False, temperature=0.6)), sampling_defaults(GenerationConfig())
        ({'temperature': 0.0}, {})
    """
    found = {key: value for key in SAMPLED if (value := getattr(config, key)) is not None}
    if config.do_sample is False:
        found = {"temperature": 0.0}
    elif found or config.do_sample:
        found = {"temperature": 1.0} | found
    if config.repetition_penalty is not None:
        found["repetition_penalty"] = config.repetition_penalty
    try:
        Sampling(**found)
    except ValueError as error:
        raise ValueError(f"{name}: in its generation config {error}") from None
    return found


def ignored_settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings that `generate` obeys, that change texts, and that are ignored here, with their values.

    A setting that a later version of `transformers` has added counts, unless it has its default value.

    Example:
        >>> ignored_settings(GenerationConfig(num_beams=4, no_repeat_ngram_size=0, temperature=0.6, typical_p=0.9))
        {'num_beams': 4}
    """
    watched = IGNORED | (IGNORED_IF_SAMPLED if config.do_sample else {})
    known = {*GIVEN_OR_OBEYED, *NO_MATTER, *IGNORED, *IGNORED_IF_SAMPLED, "cache_implementation"}
    added = {key: (value,) for key, value in vars(GenerationConfig()).items() if key not in known and key[0] != "_"}
    found = {key: getattr(config, key, None) for key in watched | added}
    found = {key: value for key, value in found.items() if value is not None and value not in (watched | added)[key]}
    if config.cache_implementation == "quantized":  # the others hold the same numbers
        found["cache_implementation"] = config.cache_implementation
    return found


def complaint(config: GenerationConfig) -> str | None:
    """A sentence about the settings that are ignored; None where there are none.

    Example:
        >>> complaint(GenerationConfig(num_beams=4, min_length=3))
        'its generation_config asks for min_length=3, num_beams=4, which is ignored'
    """
    found = ignored_settings(config)
    values = {key: value.to_dict() if hasattr(value, "to_dict") else value for key, value in found.items()}
    asked = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in values.items())
    return f"its generation_config asks for {asked}, which is ignored" if asked else None


def penalty_complaint(config: GenerationConfig) -> str | None:
    """A sentence about a repetition penalty, which `generate` of `transformers` obeys greedily too; None for none.

    Example:
        >>> penalty_complaint(GenerationConfig(repetition_penalty=1.1))
        'its generation_config asks for repetition_penalty=1.1, which only chat and serve obey unasked'
    """
    penalty = config.repetition_penalty
    told = f"its generation_config asks for repetition_penalty={penalty}, which only chat and serve obey unasked"
    return None if penalty in (None, 1) else told


def _token_ids(found: object, setting: str, name: str) -> list[int]:
    if found is None:
        return []
    if not isinstance(found, (list, tuple)) or any(type(token) is not int for token in found):
        raise ValueError(f"{name}: {setting} is {found!r} in its generation config, where token ids belong")
    return list(found)

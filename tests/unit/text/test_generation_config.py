"""What a model's generation config asks for, against `generate` of `transformers`, which obeys it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.text.generation_config import (
    GIVEN_OR_OBEYED,
    IGNORED,
    IGNORED_IF_SAMPLED,
    NO_MATTER,
    PenaltyWarning,
    complaint,
    end_ids,
    penalty_complaint,
    sampling_defaults,
    suppressed_ids,
)
from tests.conftest import tiny_model, tiny_tokenizer

EXACT = Runtime(dtype="float64")
PROMPT, NEW = [7, 3, 9], 24


def generated(engine: Engine, **settings: Any) -> list[int]:
    """The greedy answer of `generate`; it has `pad_token_id` so that it does not warn."""
    found = engine.target.lm.model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), max_new_tokens=NEW,
        pad_token_id=0, return_dict_in_generate=False, **settings,
    )  # fmt: skip
    return found[0, len(PROMPT) :].tolist()


def answer(engine: Engine) -> list[int]:
    return engine.generate(engine.target.tokenizer.decode(PROMPT), max_new_tokens=NEW).tokens


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """The greedy answer that nothing ends."""
    model = tiny_model(1, rows=64)
    model.generation_config.eos_token_id = None
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, pad_token_id=0)[0, len(PROMPT) :].tolist()


def folder_of(folder: Path, ends: object, generation: dict[str, Any] | None) -> str:
    """The tiny model; None stands for no `generation_config.json`."""
    tiny_model(1, rows=64).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("ends", "generation", "length"),
    [
        ("early", None, 5),
        (["late", "early"], None, 5),
        (None, None, NEW),
        ([], None, NEW),
        ("early", {"eos_token_id": "late"}, 12),
        ("late", {"eos_token_id": ["late", "early"]}, 5),
        (None, {"eos_token_id": "early"}, 5),
        ("early", {"temperature": 1.0}, NEW),
        ("early", {"eos_token_id": None}, NEW),
        ("early", {"eos_token_id": []}, NEW),
        ("early", {"eos_token_id": -1}, NEW),
        ("early", {"eos_token_id": 10**6}, NEW),
    ],
    ids=str,
)
def test_texts_end_where_those_of_generate_end(
    tmp_path: Path, plain: list[int], ends: object, generation: dict[str, Any] | None, length: int
) -> None:
    """Guards folders whose generation config names no end: theirs was taken from the config, which `generate` does not
    do, so that texts were cut."""
    assert plain.index(plain[4]) == 4 and plain.index(plain[11]) == 11

    def ids(of: object) -> object:
        return [ids(one) for one in of] if isinstance(of, list) else {"early": plain[4], "late": plain[11]}.get(of, of)

    told = None if generation is None else {key: ids(value) for key, value in generation.items()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = load(folder_of(tmp_path, ids(ends), told), runtime=EXACT)
    assert answer(engine) == generated(engine) == plain[:length]
    never = told is not None and not told.get("eos_token_id")
    messages = [str(one.message) for one in said if "names no eos_token_id" in str(one.message)]
    assert len(messages) == never and all(f"its config.json names {plain[4]}" in message for message in messages)


@pytest.mark.parametrize("value", ["x", [1.0], [[5]], {"a": 1}, True])
def test_ends_that_are_no_tokens(tmp_path: Path, value: object) -> None:
    """Guards against texts that never end, since an end called "x" is equal to no token."""
    with pytest.raises(ValueError, match=r"eos_token_id is .* in its generation config, where token ids belong"):
        load(folder_of(tmp_path, 0, {"eos_token_id": value}), runtime=EXACT)


@pytest.mark.parametrize("ends", [99_999, [5, -7]])
def test_ends_that_no_token_can_be(tmp_path: Path, ends: object) -> None:
    """Guards against texts that go on to their limit without a word."""
    with pytest.warns(
        UserWarning, match=r"its eos_token_id (99999|-7) is not among its \d+ tokens, so it ends no text"
    ):
        load(folder_of(tmp_path, 0, {"eos_token_id": ends}), runtime=EXACT)


@pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "x/../../model.safetensors"])
def test_weights_are_read_from_their_folder_only(tmp_path: Path, file: str) -> None:
    """Guards other files of whoever loads a folder from elsewhere."""
    folder = Path(folder_of(tmp_path / "model", 0, None))
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    weights = dict.fromkeys(tiny_model(1, rows=64).state_dict(), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    for dtype in ("float32", "int8"):
        with pytest.raises(ValueError, match="which is not a file of its folder: correct it"):
            load(str(folder), runtime=Runtime(dtype=dtype))


def test_suppressed_tokens_are_never_chosen(tmp_path: Path, plain: list[int]) -> None:
    """Guards `suppress_tokens`: `generate` obeys it; also with a drafter, which does not know of it."""
    told = {"eos_token_id": plain[11], "suppress_tokens": [plain[0], plain[3], -1, 10**6]}
    folder = folder_of(tmp_path, None, told)
    expected = None
    for drafter in ("none", "ngram", "autoregressive"):
        draft = folder if drafter == "autoregressive" else None
        engine = load(folder, drafter=drafter, draft=draft, runtime=EXACT, lengths="fixed")
        expected = expected or generated(engine)
        assert answer(engine) == expected
    assert expected is not None and expected != plain and not {plain[0], plain[3]} & set(expected)
    for value in ("x", [1.5]):
        with pytest.raises(ValueError, match="suppress_tokens is"):
            suppressed_ids(GenerationConfig(suppress_tokens=value))


ASKED = {
    "guidance_scale": 1.5, "sequence_bias": [[[5], -1.0]], "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[5]], "min_length": 5,
    "min_new_tokens": 5, "forced_bos_token_id": 5, "forced_eos_token_id": 5, "remove_invalid_values": True,
    "exponential_decay_length_penalty": [3, 1.5], "begin_suppress_tokens": [5], "watermarking_config": {"bias": 2.0},
    "max_time": 1.0, "stop_strings": ["x"], "is_assistant": True, "num_beams": 2, "num_beam_groups": 2,
    "diversity_penalty": 0.5, "constraints": [[5]], "force_words_ids": [[5]], "penalty_alpha": 0.6,
    "dola_layers": "low", "assistant_ensemble_weight": 0.5, "token_healing": True,
}  # fmt: skip
ASKED_IF_SAMPLED = {"top_h": 0.5, "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}


@pytest.mark.parametrize("setting", ASKED)
def test_what_is_ignored_is_told(setting: str) -> None:
    """Guards against settings of a model's author that nothing obeys and nothing mentions."""
    told = complaint(GenerationConfig(**{setting: ASKED[setting]}))
    assert told is not None and told.startswith(f"its generation_config asks for {setting}=") and "\n" not in told
    for neutral in (None, *IGNORED[setting]):
        assert complaint(GenerationConfig(**{setting: neutral})) is None


def test_a_penalty_that_only_some_commands_obey_is_told(tmp_path: Path) -> None:
    """Guards greedy texts of `generate`, which are not those of `transformers` then."""
    folder = folder_of(tmp_path, 0, {"eos_token_id": 0, "repetition_penalty": 1.2})
    told = f"^{folder}: its generation_config asks for repetition_penalty=1.2, which only chat and serve obey unasked$"
    with pytest.warns(PenaltyWarning, match=told) as said:
        load(folder, runtime=EXACT)
    assert len(said) == 1
    for neutral in (None, 1, 1.0):
        assert penalty_complaint(GenerationConfig(repetition_penalty=neutral)) is None


@pytest.mark.parametrize(
    ("asked", "defaults"),
    [
        ({}, {}),
        ({"eos_token_id": 0}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "min_p": 0.1}, {"temperature": 0.6, "min_p": 0.1}),
        ({"top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
         {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_defaults_of_sampling(tmp_path: Path, asked: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Guards what is read of a file: nothing that it does not have, such as the 50 of `transformers` for top-k."""
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    assert sampling_defaults(GenerationConfig.from_pretrained(tmp_path)) == defaults


@pytest.mark.parametrize("asked", [{"top_p": 0}, {"temperature": "hot"}, {"top_k": -1}, {"repetition_penalty": 0}])
def test_defaults_that_there_are_not(asked: dict[str, Any]) -> None:
    """Guards against requests that are refused for what they did not ask for."""
    config = GenerationConfig()
    for key, value in asked.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=f"m: in its generation config {next(iter(asked))}="):
        sampling_defaults(config, "m")


def test_all_settings_of_transformers_are_known() -> None:
    """Guards against settings that a later version of `transformers` adds, or that were forgotten here."""
    known = {*GIVEN_OR_OBEYED, *NO_MATTER, *IGNORED, *IGNORED_IF_SAMPLED, "cache_implementation"}
    assert {key for key in vars(GenerationConfig()) if not key.startswith("_")} <= known
    assert len(known) == len(GIVEN_OR_OBEYED) + len(NO_MATTER) + len(IGNORED) + len(IGNORED_IF_SAMPLED) + 1
    assert (ASKED.keys(), ASKED_IF_SAMPLED.keys()) == (IGNORED.keys(), IGNORED_IF_SAMPLED.keys())


def test_settings_of_sampling_are_told_where_generate_would_sample() -> None:
    """Guards against warnings about settings that `generate` does not read either."""
    for setting, value in ASKED_IF_SAMPLED.items():
        assert complaint(GenerationConfig(**{setting: value})) is None
        assert complaint(GenerationConfig(do_sample=True, **{setting: value})) == (
            f"its generation_config asks for {setting}={value}, which is ignored"
        )


def test_a_cache_that_rounds_is_told() -> None:
    """Guards texts of a quantized cache; other caches of `transformers` hold the same numbers."""
    assert complaint(GenerationConfig(cache_implementation="static")) is None
    assert "cache_implementation='quantized'" in str(complaint(GenerationConfig(cache_implementation="quantized")))


def test_a_setting_that_is_added_later_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards later versions of `transformers`, whose settings nobody has looked at yet; keys that it does not know it
    does not obey either."""
    real = GenerationConfig.__init__

    def init(config: GenerationConfig, **settings: Any) -> None:
        real(config, **{"later": 1, **settings})

    assert complaint(GenerationConfig(chat_format="chatml")) is None
    monkeypatch.setattr(GenerationConfig, "__init__", init)
    assert complaint(GenerationConfig()) is None
    assert complaint(GenerationConfig(later=2)) == "its generation_config asks for later=2, which is ignored"


def test_the_warning_is_one_and_short(tmp_path: Path) -> None:
    """Guards a terminal full of one model's settings; a setting of an older config.json is one of them."""
    told = {"eos_token_id": 0, "bad_words_ids": [[token] for token in range(60)], "num_beams": 4, "temperature": 0.6}
    folder = folder_of(tmp_path / "model", 0, told)
    with pytest.warns(UserWarning, match="asks for") as said:
        load(folder, runtime=EXACT)
    (message,) = [str(one.message) for one in said if "asks for" in str(one.message)]
    assert message.startswith(f"{folder}: its generation_config asks for bad_words_ids=[[0], [1], [2],")
    assert message.endswith("num_beams=4, which is ignored") and len(message) < len(folder) + 150
    watermark = WatermarkingConfig(bias=2.0, seeding_scheme="selfhash")
    assert "'bias': 2.0" in str(complaint(GenerationConfig(watermarking_config=watermark)))


@pytest.mark.parametrize(
    "settings",
    [
        {"early_stopping": True}, {"length_penalty": 2.0}, {"renormalize_logits": True}, {"use_cache": False},
        {"prompt_lookup_num_tokens": 3}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
        {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}, {"prefill_chunk_size": 2},
        {"assistant_confidence_threshold": 0.9}, {"assistant_lookbehind": 3}, {"target_lookbehind": 3},
        {"cache_implementation": "static"}, {"disable_compile": True}, {"output_scores": True},
        {"output_logits": True}, {"output_hidden_states": True}, {"bos_token_id": 5}, {"decoder_start_token_id": 5},
        {"typical_p": 0.5}, {"top_h": 0.5}, {"temperature": 0.5}, {"top_k": 3}, {"min_p": 0.5}, {"low_memory": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_told_changes_nothing(plain: list[int], settings: dict[str, Any]) -> None:
    """Guards the list of settings that are said to be no matter, against `generate` itself."""
    model = tiny_model(1, rows=64)
    model.generation_config.eos_token_id = None
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    assert complaint(model.generation_config) is None
    found = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=False)
    assert found[0, len(PROMPT) :].tolist() == plain


def test_token_zero_is_an_end() -> None:
    """Guards against 0 taken for none."""
    assert end_ids(GenerationConfig(eos_token_id=0)) == end_ids(GenerationConfig(eos_token_id=[0])) == {0}

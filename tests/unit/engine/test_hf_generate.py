"""`custom_generate`: what `generate` of transformers gives, in fewer passes; and refusals of what it cannot give."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    WatermarkingConfig,
)

import paradraft
from paradraft import Sampling
from paradraft.engine.hf_generate import OURS
from paradraft.engine.loader import load
from paradraft.formats.folder import save_model
from paradraft.models.runtime import Runtime
from tests.conftest import VOCAB
from tests.support.drafts import draft_of

TEXTS = ["hello", "abcabcabc", "T"]


@pytest.fixture(scope="module")
def folder(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target without rows that are no tokens: with random weights `generate` would choose them too."""
    model = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float64)
    model.resize_token_embeddings(VOCAB, mean_resizing=False)
    found = tmp_path_factory.mktemp("target") / "target"
    save_model(found, model, AutoTokenizer.from_pretrained(family / "target"))
    return found


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def inputs_of(family: Path, texts: list[str] = TEXTS) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(family / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


def ours(family: Path, drafter: str = "pard", **settings: Any) -> dict[str, Any]:
    return {
        "custom_generate": paradraft.custom_generate, "drafter": drafter,
        "draft_model": str(draft_of(family, drafter)) if drafter != "ngram" else None, "k": 4, **settings,
    }  # fmt: skip


class EveryThird(StoppingCriteria):
    """Ends a row after a token that three divides, once it has some."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return (input_ids[:, -1] % 3 == 0) & (torch.tensor(input_ids.shape[1] > 14))


def shifted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Depends on the last token, and on how long the text is, padding included."""
    return scores.roll(1, dims=1) if ids.shape[1] % 2 else scores + 0.01 * ids[:, -1:]


@pytest.mark.parametrize("drafter", ["pard", "autoregressive", "ngram"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3, "min_new_tokens": 9, "no_repeat_ngram_size": 3},
        {"logits_processor": LogitsProcessorList([shifted])},
        {"stopping_criteria": StoppingCriteriaList([EveryThird()])},
        {"eos_token_id": [5, 9], "suppress_tokens": [7, 8]},
        {"max_length": 18, "max_new_tokens": None},
        {"return_dict_in_generate": True},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_greedy_answers_are_those_of_generate(
    family: Path, model: PreTrainedModel, drafter: str, settings: dict[str, Any]
) -> None:
    """Guards batches with padding, processors that see it, criteria inside an accepted run, ends, and lengths."""
    asked = {**inputs_of(family), "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, **settings}
    expected, found = model.generate(**asked), model.generate(**asked, **ours(family, drafter))
    if settings.get("return_dict_in_generate"):
        expected, found = expected.sequences, found.sequences
    assert torch.equal(found, expected)


def test_the_passes_are_fewer(family: Path, model: PreTrainedModel) -> None:
    """Control: what comes out is also what decoding without this gives, so that it could have done nothing."""
    model.generate(**inputs_of(family), max_new_tokens=30, pad_token_id=0, **ours(family, "pard"))
    (engine,) = getattr(model, OURS).engines.values()
    stats = engine.drafter.models[0].passes
    assert sum(stats.values()) > 0


def test_sampled_answers_are_the_engines(family: Path, folder: Path, model: PreTrainedModel) -> None:
    """Guards the seed: the text of `Engine` with the same settings, a seed for each row; without one torch's generator
    decides, as for `generate`."""
    engine = load(str(folder), runtime=Runtime(dtype="float64"))
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    asked = {**inputs_of(family), "max_new_tokens": 20, "do_sample": True, "pad_token_id": 0, **settings}
    found = model.generate(**asked, **ours(family, seed=5))
    rows = [row[mask.bool()].tolist() for row, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True)]
    for number, row in enumerate(rows):
        expected = engine.generate(row, max_new_tokens=20, sampling=Sampling(seed=5 + number, **settings)).tokens
        answer = found[number, asked["input_ids"].shape[1] :].tolist()
        assert answer[: len(expected)] == expected and not any(answer[len(expected) :])
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model.generate(**asked, **ours(family)).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("settings", [{}, {"top_k": 30, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01}])
def test_a_warper_of_the_users_acts_beside_those_of_the_settings(
    family: Path, model: PreTrainedModel, settings: dict[str, Any]
) -> None:
    """Guards a warper in `logits_processor`, which was taken for one that `generate` had added, and left out: of the
    likeliest token alone, sampling is greedy."""
    warper = LogitsProcessorList([TopKLogitsWarper(1)])
    asked = {**inputs_of(family), "max_new_tokens": 12, "do_sample": True, "pad_token_id": 0, **settings}
    expected = model.generate(**asked, logits_processor=warper)
    assert torch.equal(model.generate(**asked, logits_processor=warper, **ours(family)), expected)
    assert not torch.equal(model.generate(**asked, **ours(family, seed=1)), expected)


def test_a_model_that_has_learnt_is_prepared_again(family: Path, model: PreTrainedModel) -> None:
    """Guards training loops that sample: passes have copies of the weights."""
    asked = {**inputs_of(family), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**asked, **ours(family))
    kept = getattr(model, OURS)
    assert torch.equal(model.generate(**asked, **ours(family)), before) and getattr(model, OURS) is kept
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-3)
    after = model.generate(**asked, **ours(family))
    assert torch.equal(after, model.generate(**asked)) and not torch.equal(after, before)


def test_copies_of_a_model_have_no_engines(family: Path, model: PreTrainedModel) -> None:
    """Guards moving averages, and processes that are handed a model: passes cannot be copied."""
    asked = {**inputs_of(family), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**asked, **ours(family))
    kept = getattr(model, OURS)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not getattr(copied, OURS).engines
        assert torch.equal(copied.generate(**asked, **ours(family)), before)
    assert getattr(model, OURS) is kept and kept.engines


def test_rows_that_only_fill_the_embedding_up(family: Path) -> None:
    """Guards processors made for every row of the embedding: `generate` shows and chooses all of them."""
    model = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float64)
    assert model.config.vocab_size > VOCAB
    bias = torch.linspace(0, 1, model.config.vocab_size, dtype=torch.float64)
    processor = LogitsProcessorList([lambda ids, scores: scores + bias])
    asked = {**inputs_of(family), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**asked, logits_processor=processor)
    assert torch.equal(model.generate(**asked, logits_processor=processor, **ours(family)), expected)


def test_a_processor_of_the_prompt_serves_one(family: Path, model: PreTrainedModel) -> None:
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "encoder_no_repeat_ngram_size": 2}
    asked = {**inputs_of(family, ["abcabc"]), **settings}
    assert torch.equal(model.generate(**asked, **ours(family)), model.generate(**asked))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 2}, "num_beams=2 cannot be served"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p=0.5 cannot be served"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True cannot be served"),
        ({"prefix_allowed_tokens_fn": lambda row, text: [1, 2]}, "PrefixConstrainedLogitsProcessor is no function"),
        ({"encoder_repetition_penalty": 1.2}, "EncoderRepetitionPenaltyLogitsProcessor serves one prompt, and there"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor serves one prompt, and there are 3"),
        ({"do_sample": True, "watermarking_config": WatermarkingConfig()}, "watermarking_config cannot be served when"),
        ({"constraints": [1]}, r"constraints=\[1\] cannot be served"),
        ({"position_ids": torch.zeros(3, 9, dtype=torch.long)}, "position_ids other than one after the other"),
        ({"attention_mask": torch.zeros(3, 9, dtype=torch.long)}, "prompt 0 is empty"),
        ({"attention_mask": torch.zeros(3, 10)}, r"attention_mask of shape \(3, 10\): use \(3, 9\)"),
        ({"seed": "7"}, "seed='7': use a whole number"),
        ({"max_new_tokens": 100_000}, r"the model has room for \d+ tokens, and \d+ are asked for"),
        ({"k": 0}, "k=0"),
        ({"drafter": "nothing"}, "nothing"),
        ({"draft_model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_what_cannot_be_served_is_refused(
    family: Path, model: PreTrainedModel, settings: dict[str, Any], said: str
) -> None:
    """Guards settings that would be ignored: the text would be another one, and nobody would know."""
    asked = {**inputs_of(family), "max_new_tokens": 8, "pad_token_id": 0, **ours(family), **settings}
    with pytest.raises(ValueError, match=said):
        model.generate(**asked)


def test_autocast_is_refused(family: Path, model: PreTrainedModel) -> None:
    """Guards against other tokens than those of `generate`, whose passes it changes and ours not."""
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast cannot be served"):
        model.generate(
            torch.tensor([[5, 6]]), custom_generate=paradraft.custom_generate, max_new_tokens=3, drafter="ngram"
        )


def test_prompts_that_are_padded_on_the_right_are_refused(family: Path, model: PreTrainedModel) -> None:
    asked = inputs_of(family)
    turned = {name: value.flip(1) for name, value in asked.items()}
    with pytest.raises(ValueError, match="must be padded on the left"):
        model.generate(**turned, max_new_tokens=8, pad_token_id=0, **ours(family))

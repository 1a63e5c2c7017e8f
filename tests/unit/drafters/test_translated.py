"""A draft model with other tokens than the target."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paradraft.core import Committed
from paradraft.decode.generation import Generation
from paradraft.drafters import drafter_class
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from tests.conftest import tiny_tokenizer
from tests.support.decoding import requests

EXACT = Runtime(dtype="float64", compiled=False)
PROMPTS = ["helloworld", "abc", "The0quick1brown"]


@pytest.fixture(scope="module")
def twin(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with the ids of its tokens in another order: it says the same in other tokens."""
    folder = tmp_path_factory.mktemp("twin")
    model = AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float64)
    vocabulary = tiny_tokenizer().get_vocab()
    shifted = {token: (number * 7 + 3) % len(vocabulary) for token, number in vocabulary.items()}
    assert sorted(shifted.values()) == sorted(vocabulary.values())
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        old = rows.clone()
        for token, number in vocabulary.items():
            rows[shifted[token]] = old[number]
    model.config.eos_token_id = model.generation_config.eos_token_id = shifted["<|eos|>"]
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(shifted, unk_token="+"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>").save_pretrained(folder)
    return folder


def engine(family: Path, draft: Path, **settings: Any) -> Engine:
    settings = {"drafter": "translated", "k": 4, "lengths": "fixed", "runtime": EXACT} | settings
    return load(str(family / "target"), draft=str(draft), **settings)


def test_a_twin_with_other_tokens_is_always_right(family: Path, twin: Path) -> None:
    """Guards the whole way there and back: a draft model that says what the target says, in other ids, is accepted
    whole, in rows of different lengths that end at different times. Control: an ordinary draft with these tokens is
    refused."""
    with engine(family, twin) as drafted:
        results = drafted.generate(PROMPTS, max_new_tokens=40)
    plain = load(str(family / "target"), runtime=EXACT, drafter="none")
    for result, expected in zip(results, plain.generate(PROMPTS, max_new_tokens=40), strict=True):
        assert result.tokens == expected.tokens
        assert result.stats.accepted == result.stats.drafted and result.stats.acceptance_length == 5
    with pytest.raises(ValueError, match=r"splits text into other tokens than the target.*--drafter translated"):
        engine(family, twin, drafter="autoregressive")


def test_the_next_turn_reads_only_what_is_new(family: Path, twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards kept rows: the draft model reads a conversation once, though its tokens are others."""
    target = str(family / "target")
    with load(target, draft=str(twin), runtime=EXACT, drafter="translated", k=4, lengths="fixed", kept_rows=2) as kept:
        prompt = "helloworld" * 6
        first = kept.generate(prompt, max_new_tokens=12)
        read: list[int] = []
        lm = kept.drafter.models[0]
        forward = lm.forward
        monkeypatch.setattr(
            lm, "forward", lambda tokens, **rest: (read.append(tokens.shape[1]), forward(tokens, **rest))[1]
        )
        again = prompt + first.text + "abc"
        result = kept.generate(again, max_new_tokens=12)
    assert read[0] < 40, read
    assert result.tokens == load(target, runtime=EXACT, drafter="none").generate(again, max_new_tokens=12).tokens


def test_no_room_and_wrong_settings(family: Path, twin: Path, tmp_path: Path) -> None:
    """Guards draft models with a shorter context: they draft while there is room, and the answer goes on, also beside a
    row that has room."""
    short = tmp_path / "short"
    shutil.copytree(twin, short)
    config = short / "config.json"
    config.write_text(re.sub(r'("max_position_embeddings": )\d+', r"\g<1>24", config.read_text()))
    prompts, sampling = ["helloworld", "a", "helloworldhelloworldhelloworld"], Sampling(temperature=0.5, seed=2)
    with engine(family, short) as drafted:
        results = drafted.generate(prompts, max_new_tokens=40, sampling=sampling)
    plain = load(str(family / "target"), runtime=EXACT, drafter="none")
    for result, expected in zip(results, plain.generate(prompts, max_new_tokens=40, sampling=sampling), strict=True):
        assert result.tokens == expected.tokens
    assert sum(results[1].stats.accepted) > sum(results[0].stats.accepted) > 0
    assert results[2].stats.nodes == 0
    with pytest.raises(ValueError, match=r"of='medusa': use autoregressive or pard"):
        engine(family, twin, drafter="translated:of=medusa")
    assert not drafter_class("translated:of=pard").traits.drafts_one_by_one


def test_the_last_room_is_not_exceeded(family: Path, twin: Path, tmp_path: Path) -> None:
    """Guards rows at the end of the draft model's context, beside one that drafts more: they draft what fits, and what
    has no room is not read ahead."""
    short = tmp_path / "short"
    shutil.copytree(twin, short)
    config = short / "config.json"
    config.write_text(re.sub(r'("max_position_embeddings": )\d+', r"\g<1>24", config.read_text()))
    drafted = engine(family, short, runtime=Runtime(dtype="float64", compiled=False, width=12))
    drafter, texts = drafted.drafter, [[5] * 21, [6] * 60, [5, 6, 7]]
    drafter.start(drafted.new_batch().drafting, drafted.target.device)
    drafter.join(requests(texts), Committed(tokens=texts))
    assert 1 not in drafter.catch_up([0, 1, 2], 2)
    assert [sum(token >= 0 for token in row) for row in drafter.propose([4, 4, 4]).tokens.tolist()] == [2, 0, 4]


@pytest.mark.parametrize("compiled", [False, "native"])
def test_special_tokens_that_the_draft_model_lacks(family: Path, twin: Path, tmp_path: Path, compiled: Any) -> None:
    """Guards answers that go on after such tokens, several in a row: a draft model that has nothing new to read drafts
    nothing."""
    other = tmp_path / "other"
    shutil.copytree(twin, other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text((other / name).read_text().replace("<|eos|>", "<|stop|>"))
    runtime = EXACT if not compiled else Runtime(dtype="float32")
    target = str(family / "target")
    with load(target, draft=str(other), runtime=runtime, drafter="translated", k=3, lengths="fixed") as drafted:
        theirs = PreTrainedTokenizerFast.from_pretrained(other).convert_tokens_to_ids("<|stop|>")
        assert drafted.drafter._translator.begin().translated([theirs]) == [0], "the end of a text has another name"
        batch = drafted.new_batch()
        sampling = Sampling(logit_bias=((0, 100.0),))
        rows = [Generation(each) for each in requests([[5, 6, 7], [8, 9]], sampling, 8)]
        batch.join([*rows, *map(Generation, requests([[4, 5]], Sampling(), 8))])
        for _ in range(6):
            batch.step()
    assert all(row.tokens[:4] == [0] * 4 for row in rows)

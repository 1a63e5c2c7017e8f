"""The text of answers, as results and as streams, with tokenizers of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from tests.conftest import tiny_model
from tests.support.small_tokenizers import END, KINDS

Engines = Callable[[str], Engine]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """A random model for each kind of tokenizer, with a drafter that needs no model."""

    @cache
    def engine(kind: str) -> Engine:
        folder, tokenizer = tmp_path_factory.mktemp("model"), KINDS[kind]()
        model = tiny_model(3, layers=1, rows=len(tokenizer))
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return load(str(folder), drafter="ngram", k=5, runtime=Runtime(dtype="float32"), lengths="fixed")

    return engine


def writing(engine: Engine, pieces: list[str]) -> Sampling:
    """Lets the model write these tokens, whatever it wants to say."""
    tokens = engine.target.tokenizer.convert_tokens_to_ids(pieces)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = ids.shape[1] - 1
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(tokens[place : place + 1]), 0.0)

    return Sampling(processors=[processor])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_and_a_result_have_one_text(engines: Engines, kind: str) -> None:
    """Guards streams: random tokens, so invalid bytes, half characters and special tokens, in rounds of any length."""
    engine = engines(kind)
    tokens = sorted(engine.target.tokenizer.get_vocab().values())
    drafted = 0
    for seed in range(12):
        # Few tokens repeat, so that the drafter finds something and rounds have several.
        chosen = random.Random(seed).sample(tokens, 5)
        bias = {token: -30.0 for token in tokens if token not in chosen}
        sampling = Sampling(temperature=1.5, seed=seed, logit_bias=bias)
        stop = [None, ["a"], [END, "é", "s"], [" "]][seed % 4]
        prompt = [chosen[0], tokens[-1]]
        chunks = list(engine.stream(prompt, max_new_tokens=24, sampling=sampling, stop=stop))
        [result] = engine.generate([prompt], max_new_tokens=24, sampling=sampling, stop=stop)
        assert [token for chunk in chunks for token in chunk.tokens] == result.tokens
        assert "".join(chunk.text for chunk in chunks) == result.text
        drafted += sum(result.accepted)
    assert drafted > 5


@pytest.mark.parametrize(
    ("kind", "prompt", "pieces", "text"),
    [
        ("byte-fallback", "the", ["▁cat", "s", "▁cat"], " cats cat"),
        ("byte-fallback, metaspace", "the", ["▁cat", "s", "▁cat"], " cats cat"),
        ("byte-fallback", "the", ["<0x0A>", "<0xE2>", "<0x82>", "<0xAC>"], "\n€"),
        ("byte-fallback", "the", ["<0xE2>", "<0x82>", "s", "\ufffd"], "\ufffd\ufffds\ufffd"),
        ("byte-fallback", "the", ["s", "<0xE2>", "<0x82>"], "s"),  # the limit cuts a character
        ("byte-level", "the", ["Ġ", "c", "ï¿½"], " c\ufffd"),
        ("byte-level", "the", ["c", "â", "Ĥ"], "c"),
        ("metaspace", "the", ["▁cat", "\ufffd", "▁cat"], " cat\ufffd cat"),
        ("word pieces", "the", ["cat", "##s", ".", "do", "n't"], " cats. don't"),
    ],
)
def test_prompt_and_text_are_the_whole_text(
    engines: Engines, kind: str, prompt: str, pieces: list[str], text: str
) -> None:
    """Guards `prompt + text` against "thecat", and a real U+FFFD against being taken for half a character."""
    engine = engines(kind)
    ids = engine.target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    sampling = writing(engine, [*engine.target.tokenizer.convert_ids_to_tokens(ids)[1:], *pieces])
    asked = {"max_new_tokens": len(pieces), "sampling": sampling}
    assert engine.generate(prompt, **asked).text == text
    assert "".join(chunk.text for chunk in engine.stream(prompt, **asked)) == text


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_special_token_may_be_a_stop_string(engines: Engines, kind: str) -> None:
    """Guards ends of turns that the model's config does not call an end: answers went on after them."""
    engine = engines(kind)
    line = "Ċ" if kind == "byte-level" else "<0x0A>"
    sampling = writing(engine, ["cat", line, END, "cat", "cat"])
    for stop, text, tokens in [([END], "cat\n", 3), (["\n" + END], "cat", 3), ((), "cat\ncatcat", 5)]:
        asked = {"max_new_tokens": 5, "sampling": sampling, "stop": stop}
        [result] = engine.generate([engine.target.tokenizer.convert_tokens_to_ids(["cat"])], **asked)
        assert (result.text, len(result.tokens)) == (text, tokens)
        assert result.finish_reason == ("stop" if stop else "length")
        chunks = engine.stream(engine.target.tokenizer.convert_tokens_to_ids(["cat"]), **asked)
        assert "".join(chunk.text for chunk in chunks) == text


def test_an_end_token_may_be_a_stop_string(engines: Engines) -> None:
    """Guards the order of the two: the same token is the end in any case, and the stop string says why."""
    engine = engines("byte-level")
    sampling = writing(engine, ["cat", "<|eos|>"])
    for stop, reason in [(["<|eos|>"], "stop"), (["x"], "eos")]:
        [result] = engine.generate([[1]], max_new_tokens=5, sampling=sampling, stop=stop)
        assert (result.text, result.finish_reason, len(result.tokens)) == ("cat", reason, 2)


def test_an_engine_shows_what_it_is(family: Path) -> None:
    """Guards notebooks, which print `<paradraft.engine.engine.Engine object at 0x…>` else."""
    engine = load(str(family / "target"), drafter="ngram", k=3, runtime=Runtime(dtype="float32"), lengths="fixed")
    shown = repr(engine)
    assert str(family / "target") in shown and "float32" in shown and "drafter='ngram'" in shown and "k=3" in shown


def test_passes_are_as_wide_as_drafts_need(family: Path) -> None:
    """Guards long drafts, for which `load` once needed a width that only the command line chose by itself."""
    draft = str(family / "pard")
    engine = load(
        str(family / "target"), drafter="pard", draft=draft, k=70, tree=90, kept_rows=np.int64(1), lengths="fixed"
    )
    plain = load(str(family / "target"))
    assert engine.generate("hello", max_new_tokens=30).tokens == plain.generate("hello", max_new_tokens=30).tokens
    with pytest.raises(ValueError, match=r"^runtime='cpu': use a Runtime"):
        load(str(family / "target"), runtime="cpu")


def test_device_and_dtype_stand_beside_the_model(family: Path) -> None:
    """Guards the two settings that most users have, and that they are not said twice."""
    folder = str(family / "target")
    engine = load(
        folder, drafter="ngram:max_ngram=5", device="cpu", dtype="fp32", runtime=Runtime(capacity=50), lengths="fixed"
    )
    assert engine.target.lm.model.dtype == torch.float32 and engine.target.capacity == 50
    assert load(folder, dtype="float64", runtime=Runtime(dtype="float64")).target.lm.model.dtype == torch.float64
    with pytest.raises(ValueError, match=r"^dtype='bf16': runtime says 'float64', give it once"):
        load(folder, dtype="bf16", runtime=Runtime(dtype="float64"))
    for setting in ({"dtype": "float17"}, {"device": "abacus"}):
        with pytest.raises(ValueError, match=r"float17|abacus"):
            load(folder, **setting)

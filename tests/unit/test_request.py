"""Prompts as token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from paradraft import Engine, Sampling, load
from paradraft.models.runtime import Runtime


@pytest.fixture(scope="module")
def engine(family: Path) -> Engine:
    return load(str(family / "target"), runtime=Runtime(dtype="float64"))


def test_token_ids_are_taken_as_they_are(engine: Engine) -> None:
    """Guards conversations: their template has put everything there, and no special token may be added."""
    sampling = Sampling(temperature=0.9, seed=1)
    from_text = engine.generate(["hello", "ab"], max_new_tokens=6, sampling=sampling)
    ids = [engine.target.tokenizer(text)["input_ids"] for text in ("hello", "ab")]
    from_ids = engine.generate(ids, max_new_tokens=6, sampling=sampling)
    assert [result.tokens for result in from_ids] == [result.tokens for result in from_text]


def test_a_prompt_does_not_end(family: Path) -> None:
    """Guards against an answer that begins behind an end-of-text, where the tokenizer puts one behind every text."""
    engine = load(str(family / "target"), runtime=Runtime(dtype="float64"))
    expected = engine.generate([[52, 1, 2]], max_new_tokens=6)
    engine.target.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="Z $A <|eos|>", special_tokens=[("Z", 52), ("<|eos|>", 0)]
    )
    for prompt in ("ab", "Zab"):
        assert [engine.generate(prompt, max_new_tokens=6).tokens] == [result.tokens for result in expected]


@pytest.mark.parametrize("token", [-1, 64])
def test_unknown_token_ids_are_refused(engine: Engine, token: int) -> None:
    """Guards against -1, which means "nothing here" inside, and against an error from the depth of the embedding."""
    with pytest.raises(ValueError, match=f"prompt 2 has the token id {token}: use 0 to 63"):
        engine.generate([[1], [2, token]], max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        engine.generate([[1], []], max_new_tokens=4)

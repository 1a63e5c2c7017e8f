"""Prompts as token ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling


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
    """Guards against an answer that begins after an end-of-text, where the tokenizer puts one after every text."""
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


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([[1.9]], "the prompt: token id=1.9: use a whole number"),
        ([[1], [2, 3.0]], "prompt 2: token id=3.0: use a whole number"),
        ([[True]], "the prompt: token id=True"),
        ([["1"]], "the prompt: token id='1'"),
        ([[None]], "the prompt: token id=None"),
        ([[[1]]], r"the prompt: token id=\[1\]"),
        ([1, 2.5], "the prompt: token id=2.5: use a whole number"),
        ([1, [2]], r"the prompt: token id=\[2\]: use a whole number"),
        (["a", None], "prompt 2 is None: use a text"),
        ([b"ab"], "the prompt is b'ab': use a text"),
        ([(1, 2.0)], r"the prompt: token id=2.0: use a whole number"),
        ([torch.tensor([1.0])], r"the prompt: token id=1.0: use a whole number"),
        (torch.tensor(5), r"prompts=tensor\(5\): use a text"),
        ([], r"prompts=\[\]: give at least one"),
        (None, "prompts=None: use a text"),
        (5, "prompts=5: use a text"),
        (b"ab", "prompts=b'ab': use a text"),
        ({"prompt": "a"}, "prompts={'prompt': 'a'}: use a text"),
        ((), r"prompts=\[\]: give at least one"),
        ((text for text in "ab"), "prompts=<generator"),
        (torch.ones(2, 2, 2, dtype=torch.long), r"prompt 1: token id=\[1, 1\]"),
    ],
)
def test_prompts_of_other_types_are_refused(engine: Engine, prompts: object, named: str) -> None:
    """Guards against token ids that are rounded down, and errors from deep inside: one line names what is wrong."""
    for ask in (engine.generate, engine.check):
        with pytest.raises(ValueError, match=f"^{named}") as caught:
            ask(prompts, max_new_tokens=4)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("prompt", [None, 5, b"ab", ["a"], ("a",), [1.5], {}])
def test_a_stream_has_one_prompt(engine: Engine, prompt: object) -> None:
    """Guards against errors that come with the first piece of text, or from deep inside."""
    with pytest.raises(ValueError, match=r"^the prompt(:| is) .*: use a"):
        engine.stream(prompt)


@pytest.mark.parametrize(
    "one", [[1, 2], (1, 2), numpy.array([1, 2]), torch.tensor([1, 2]), [numpy.int32(1), torch.tensor(2)]]
)
def test_token_ids_in_any_form(engine: Engine, one: Any) -> None:
    """Guards what a tokenizer returns, in whichever form it was asked for: one row or many, beside texts."""
    expected = engine.generate("ab", max_new_tokens=4).tokens
    assert engine.generate(one, max_new_tokens=4).tokens == expected
    assert [answer.tokens for answer in engine.generate([one, "ab", [1, 2]], max_new_tokens=4)] == [expected] * 3
    assert [token for chunk in engine.stream(one, max_new_tokens=4) for token in chunk.tokens] == expected
    for rows in (numpy.array([[1, 2], [1, 2]]), torch.tensor([[1, 2], [1, 2]]), ((1, 2), (1, 2))):
        assert [answer.tokens for answer in engine.generate(rows, max_new_tokens=4)] == [expected] * 2


def test_whole_numbers_of_numpy_are_token_ids(engine: Engine) -> None:
    """Guards prompts that come from arrays, and streams of token ids."""
    expected = engine.generate([[1, 2]], max_new_tokens=numpy.int64(4))
    assert engine.generate([list(numpy.array([1, 2]))], max_new_tokens=4)[0].tokens == expected[0].tokens
    assert [token for chunk in engine.stream([1, 2], max_new_tokens=4) for token in chunk.tokens] == expected[0].tokens


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        *(
            ("max_new_tokens", wrong, f"max_new_tokens={wrong!r}: use a whole number")
            for wrong in (4.0, True, None, "4")
        ),
        ("max_new_tokens", [4, 2.5], "max_new_tokens=2.5: use a whole number"),
        ("max_new_tokens", 0, "max_new_tokens=0: ask for at least 1"),
        ("sampling", None, "sampling=None: use a Sampling"),
        ("sampling", {"temperature": 1.0}, "sampling={'temperature': 1.0}: use a Sampling"),
        ("sampling", [None, None], "sampling=None: use a Sampling"),
        ("stop", 5, "stop=5: use a string"),
        ("stop", b"x", "stop=b'x': use a string"),
        ("stop", ["x", 5], "stop: 5 is no string"),
        *(("batch_size", wrong, f"batch_size={wrong!r}: use a whole number") for wrong in (2.0, True, None, "2")),
    ],
)
def test_settings_of_other_types_are_refused(engine: Engine, setting: str, value: object, named: str) -> None:
    """Guards against settings that are read as something else, and found when half of the work is done."""
    passes = []
    engine.target.lm._pass, kept = lambda *args: passes.append(args), engine.target.lm._pass
    try:
        with pytest.raises(ValueError, match=f"^{re.escape(named)}"):
            engine.generate(["a", "b"], **{"max_new_tokens": 4, setting: value})
        assert not passes
    finally:
        engine.target.lm._pass = kept

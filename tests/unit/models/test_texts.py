"""What a tokenizer puts around texts: one BOS in front, and no end behind."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paradraft.models.texts import continuation, opening
from tests.conftest import tiny_tokenizer

A, B, BOS, EOS = 1, 2, 52, 0
SPECIAL = [("Z", BOS), ("<|eos|>", EOS)]


@pytest.mark.parametrize(
    ("around", "before"),
    [
        (None, []), ("$A", []), ("Z $A", [BOS]), ("$A <|eos|>", []), ("Z $A <|eos|>", [BOS]),
        ("<|eos|> $A", [EOS]), ("<|eos|> $A <|eos|>", [EOS]), ("<|eos|> Z $A <|eos|>", [EOS, BOS]),
    ],
)  # fmt: skip
def test_one_bos_and_no_end(around: str | None, before: list[int]) -> None:
    """Guards prompts against an end that tells the model to stop, and against the BOS that a text brings itself and
    the tokenizer's before it; in some families BOS and end are one token."""
    tokenizer = tiny_tokenizer()
    if around is not None:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=SPECIAL)
    assert opening("ab", tokenizer) == [*before, A, B]
    assert opening("", tokenizer) == before
    assert opening(tokenizer.decode(before) + "ab", tokenizer) == [*before, A, B]
    assert continuation("ab", tokenizer) == [A, B]


def test_a_tokenizer_of_few_letters() -> None:
    """Guards tokenizers that have no "a", such as those of proteins, and unknown letters that become the BOS."""
    vocabulary = {"<|eos|>": 0, "C": 1, "G": 2, "Z": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="Z"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.post_processor = TemplateProcessing(single="Z $A", special_tokens=[("Z", 3)])
    assert opening("CG", PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")) == [3, 1, 2]

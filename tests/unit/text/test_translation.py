"""A text in the tokens of two tokenizers."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paradraft.text.tokenization import REPLACEMENT, continuation_encoder, exact_text
from paradraft.text.translation import KEPT, LONGEST, Translation, Translator

CORPUS = [
    "def add(a, b):\n    return a + b  # the sum\n\n\nclass Pair:\n\tleft = 1234567\n",
    "Ein größeres Beispiel: Übung macht den Meister, naïve café.",
    "これは日本語の文章です。空白はありません。中文也没有空格。",
    "emoji 😀👩‍👩‍👧 and a family, and more words for the merges of the words",
]
SPECIAL = ["<|start|>", "<|end|>"]


@cache
def byte_level(size: int, *more: str) -> PreTrainedTokenizerBase:
    """BPE on bytes, as of GPT-2, with special tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*more, *SPECIAL], initial_alphabet=alphabet)
    raw.train_from_iterator(CORPUS[: 2 + size % 3], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL[1], additional_special_tokens=[SPECIAL[0]])


@cache
def sentencepiece() -> PreTrainedTokenizerBase:
    """BPE that marks spaces, puts one before a text, and falls back to bytes, as of Llama 2."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    model = json.loads(trained.to_str())["model"]
    vocabulary = model["vocab"] | {f"<0x{byte:02X}>": len(model["vocab"]) + byte for byte in range(256)}
    merges = [tuple(merge) for merge in model["merges"]]
    raw = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<unk>", unk_token="<unk>")


TOKENIZERS = {
    "small": lambda: byte_level(300, "<|other|>"),
    "large": lambda: byte_level(520),
    "sentencepiece": sentencepiece,
}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["def ", "return", " a + b", "größer", "日本語", "😀", "👩‍👩‍👧", "\t", "\n\n", "    ", " ", "12345", "é"]
        ),
        st.text(max_size=5),
        st.just("a" * (LONGEST + 9)),
    ),
    max_size=12,
).map("".join)


def translator(target: str, draft: str) -> Translator:
    first, second = TOKENIZERS[target](), TOKENIZERS[draft]()
    return Translator(target=first, draft=second, ends={})


def known(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer gives a text back: one with an unknown token or a normalization does not."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return exact_text(ids, tokenizer) == text


def text_of(row: Translation, tokenizer: PreTrainedTokenizerBase) -> str:
    return exact_text([*row.settled, *row.tail], tokenizer)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 9))
def test_the_draft_model_reads_the_text(target: str, draft: str, text: str, seed: int) -> None:
    """Guards what the draft model reads, wherever an answer is cut into rounds: the same text, in tokens that do not
    depend on the rounds, and whose settled part only grows."""
    pair, chooser = translator(target, draft), random.Random(seed)
    first, second = TOKENIZERS[target](), TOKENIZERS[draft]()
    ids = first(text, add_special_tokens=False)["input_ids"]
    if not (known(text, first) and known(text, second)):
        return
    whole, pieces, settled = pair.begin(), pair.begin(), []
    whole.add(ids)
    while ids:
        count = chooser.randint(1, 4)
        settled += pieces.add(ids[:count])
        assert pieces.settled == settled
        ids = ids[count:]
    assert (pieces.settled, pieces.tail) == (whole.settled, whole.tail)
    assert text_of(whole, second) == text
    assert len(whole.tail) <= max(4 * LONGEST, KEPT)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 9))
def test_a_draft_says_the_same_in_both(target: str, draft: str, text: str, seed: int) -> None:
    """Guards drafts: the rest of a text, in the draft model's tokens, has the same text in the target's."""
    pair = translator(target, draft)
    first, second = TOKENIZERS[target](), TOKENIZERS[draft]()
    if not (known(text, first) and known(text, second)):
        return
    ids = first(text, add_special_tokens=False)["input_ids"]
    cut = random.Random(seed).randint(0, len(ids))
    row = pair.begin()
    row.add(ids[:cut])
    if not (row.settled or row.tail):
        return
    drafted = continuation_encoder(second)(text.removeprefix(text_of(row, second)))
    if exact_text([*row.settled, *row.tail, *drafted], second) != text:
        return  # two line breaks that are one token of a tokenizer that marks spaces
    translated = row.translated(drafted)
    is_half = exact_text(ids[:cut], first).endswith(REPLACEMENT)
    assert exact_text([*ids[:cut], *translated], first) == text or (is_half and not translated)


@pytest.mark.parametrize("text", ["größer", "日本語の文章です", "a 😀👩‍👩‍👧 b", "def f():\n\treturn 12345"])
def test_drafts_follow_half_characters(text: str) -> None:
    """Guards scripts whose characters are several tokens: at every place the draft is the rest, in the target's own
    tokens, the half character's included."""
    first, second = byte_level(300, "<|other|>"), byte_level(520)
    ids = first(text, add_special_tokens=False)["input_ids"]
    half = 0
    for cut in range(1, len(ids)):
        row = Translator(target=first, draft=second, ends={}).begin()
        row.add(ids[:cut])
        rest = text.removeprefix(exact_text([*row.settled, *row.tail], second))
        half += exact_text(ids[:cut], first).endswith(REPLACEMENT)
        assert row.translated(continuation_encoder(second)(rest)) == ids[cut:], cut
    assert half or text.isascii()


def test_a_prompt_settles_a_token() -> None:
    """Guards the draft model, which cannot begin with nothing: a part of a word, half a character, and no text."""
    first, second = byte_level(520), byte_level(300, "<|other|>")
    pair = Translator(target=first, draft=second, ends={})
    begun = [pair.begin() for _ in range(3)]
    ids = [first(text, add_special_tokens=False)["input_ids"] for text in ("def", "日", "")]
    settled = [row.begin(tokens[:1]) for row, tokens in zip(begun, ids, strict=True)]
    assert all(len(tokens) == 1 for tokens in settled)
    assert exact_text([*begun[0].settled, *begun[0].tail], second) == exact_text(ids[0][:1], first)


def test_special_tokens_have_names() -> None:
    """Guards chats: shared special tokens are translated both ways, others are left out, ends end."""
    first, second = byte_level(300, "<|other|>"), byte_level(520)
    names = {name: (first.convert_tokens_to_ids(name), second.convert_tokens_to_ids(name)) for name in SPECIAL}
    other = first.convert_tokens_to_ids("<|other|>")
    pair = Translator(target=first, draft=second, ends={})
    row = pair.begin()
    say = lambda text, tokenizer: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    row.add([names["<|start|>"][0], *say("hi", first), names["<|end|>"][0], other, *say("you", first)])
    assert [*row.settled, *row.tail] == [
        names["<|start|>"][1], *say("hi", second), names["<|end|>"][1], *say("you", second),
    ]  # fmt: skip
    drafted = [*say("r", second), names["<|end|>"][1], *say("more", second)]
    assert row.translated(drafted) == [*say("r", first), names["<|end|>"][0]]
    back = Translator(target=second, draft=first, ends={other: names["<|end|>"][1]}).begin()
    back.add(say("you", second))
    assert back.translated([*say("r", first), other]) == [*say("r", second), names["<|end|>"][1]]


def test_a_space_after_a_special_token_is_drafted() -> None:
    """Guards draft models that mark spaces: the space before a word is known from the token before it, also where that
    is no part of the tail."""
    first, second = byte_level(300, "<|other|>"), sentencepiece()
    row = Translator(target=first, draft=second, ends={}).begin()
    row.add([*first("def", add_special_tokens=False)["input_ids"], first.convert_tokens_to_ids("<|other|>")])
    assert row.settled and not row.tail
    assert exact_text(row.translated(continuation_encoder(second)(" a")), first) == " a"

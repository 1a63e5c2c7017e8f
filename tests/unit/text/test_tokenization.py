"""From texts to tokens, with one BOS before and no end after; and from tokens to texts, one by one."""

from __future__ import annotations

from functools import cache
from itertools import takewhile

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paradraft.text.tokenization import Detokenizer, encode_continuation, encode_prompt
from tests.conftest import tiny_tokenizer
from tests.support.small_tokenizers import KINDS

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
    assert encode_prompt("ab", tokenizer) == [*before, A, B]
    assert encode_prompt("", tokenizer) == before
    assert encode_prompt(tokenizer.decode(before) + "ab", tokenizer) == [*before, A, B]
    assert encode_continuation("ab", tokenizer) == [A, B]


def test_a_tokenizer_of_few_letters() -> None:
    """Guards tokenizers that have no "a", such as those of proteins, and unknown letters that become the BOS."""
    vocabulary = {"<|eos|>": 0, "C": 1, "G": 2, "Z": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="Z"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.post_processor = TemplateProcessing(single="Z $A", special_tokens=[("Z", 3)])
    assert encode_prompt("CG", PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")) == [3, 1, 2]


@pytest.mark.parametrize("kind", ["byte-fallback", "byte-fallback, metaspace"])
@pytest.mark.parametrize(
    ("text", "tokens"),
    [("cat", ["cat"]), (" cat", ["▁cat"]), ("\n cat", ["<0x0A>", "▁cat"]), ("€", ["<0xE2>", "<0x82>", "<0xAC>"])],
)
def test_no_space_is_put_between_prompt_and_response(kind: str, text: str, tokens: list[str]) -> None:
    """Guards training on answers: a tokenizer that puts a space before every text reads " cat" as two spaces."""
    tokenizer = KINDS[kind]()
    assert tokenizer.convert_ids_to_tokens(encode_continuation(text, tokenizer)) == tokens
    assert tokenizer.convert_ids_to_tokens(encode_prompt("cat", tokenizer)) == ["▁cat"]


BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def written(tokens: list[int], kind: str, prompt: list[int] | None = None) -> str:
    """The text of tokens that come one by one; no piece of it is taken back."""
    growing = detokenizer(kind).after(prompt or [])
    return "".join(map(growing.add, tokens)) + growing.rest


@cache
def detokenizer(kind: str) -> Detokenizer:
    return Detokenizer(KINDS[kind]())


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


def is_half(part: bytes) -> bool:
    """Whether bytes begin a character and do not end it."""
    for fill in (b"\x80", b"\xbf"):
        for size in range(1, 4):
            try:
                if len((part + fill * size).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                pass
    return False


def half_bytes(raw: bytes) -> int:
    """How many bytes at the end are half a character."""
    return next((size for size in (3, 2, 1) if size <= len(raw) and is_half(raw[-size:])), 0)


@cache
def bytes_of(token: int, kind: str) -> bytes:
    piece = tokenizer_of(kind).convert_ids_to_tokens(token)
    if kind == "byte-level":
        return bytes(BYTES[one] for one in piece) if set(piece) <= BYTES.keys() else piece.encode()
    return bytes([int(piece[3:5], 16)]) if len(piece) == 6 and piece.startswith("<0x") else b""


def decoded(tokens: list[int], kind: str) -> str:
    """What the tokenizer says of all tokens at once, without half a character at the end."""
    special = set(detokenizer(kind).special.values())
    tokens = [token for token in tokens if token not in special]
    half = 0
    if kind == "byte-level":
        half = half_bytes(b"".join(bytes_of(token, kind) for token in tokens))
        return tokenizer_of(kind).decode(tokens)[: -1 if half else None]
    if kind.startswith("byte-fallback"):
        is_byte = [bool(bytes_of(token, kind)) for token in tokens]
        start = len(tokens) - (is_byte[::-1].index(False) if False in is_byte else len(tokens))
        half = half_bytes(b"".join(bytes_of(token, kind) for token in tokens[start:]))
    return str(tokenizer_of(kind).decode(tokens[: len(tokens) - half]))


@cache
def token_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Tokens of all kinds: any, those of a text, and those whose bytes are invalid or end within characters."""
    tokenizer = tokenizer_of(kind)
    everything = sorted(tokenizer.get_vocab().values())
    texts = st.text("the cat\n'.é€😀\ufffd", max_size=6).map(lambda text: tokenizer(text)["input_ids"])
    some = {0x80, 0xE2, 0x82, 0xF0, 0xED}
    odd = [token for token in everything if "byte" in kind and some.intersection(bytes_of(token, kind))]
    parts = [texts, st.lists(st.sampled_from(everything), max_size=4)]
    parts += [st.lists(st.sampled_from(odd), max_size=4)] if odd else []
    return st.lists(st.one_of(parts), max_size=5).map(lambda lists: [token for tokens in lists for token in tokens])


EXACT_KINDS = [kind for kind in KINDS if kind != "bytes and more"]


@pytest.mark.parametrize("kind", EXACT_KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_text_that_grows_is_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    """Guards streams and results: one token after the other gives what the tokenizer makes of all of them, with
    characters of several tokens, invalid bytes, a real U+FFFD, special tokens and spaces."""
    tokens = data.draw(token_lists(kind))
    assert written(tokens, kind) == decoded(tokens, kind)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_half_a_surrogate_is_no_character(kind: str) -> None:
    """Guards bytes that no character begins with, after which Python's decoder waits all the same: found by chance."""
    of_byte = {bytes_of(token, kind): token for token in tokenizer_of(kind).get_vocab().values()}
    tokens = [of_byte[b"\xed"], of_byte[b"\xa0"]]
    assert written(tokens, kind) == decoded(tokens, kind) == "\ufffd\ufffd"
    assert written([*tokens, of_byte[b"\x80"]], kind) == decoded([*tokens, of_byte[b"\x80"]], kind)
    assert written([of_byte[b"\xed"], of_byte[b"\x9f"]], kind) == ""
    assert written([], kind, tokens) == "", "it is the prompt's"
    assert written([of_byte[b"\x80"]], kind, tokens) == "\ufffd"


def is_valid_around(tokens: list[int], cut: int, kind: str) -> bool:
    """Whether the run of bytes on both sides of a place is text; half a character may end it at the very end."""
    parts = [bytes_of(token, kind) for token in tokens if token not in detokenizer(kind).special.values()]
    cut = sum(token not in detokenizer(kind).special.values() for token in tokens[:cut])
    before = b"".join(reversed(list(takewhile(bool, reversed(parts[:cut])))))
    after = list(takewhile(bool, parts[cut:]))
    run = before + b"".join(after)
    is_last = cut + len(after) == len(parts)
    try:
        run[: len(run) - half_bytes(run) * is_last].decode()
    except UnicodeDecodeError:
        return not before
    return True


@pytest.mark.parametrize("kind", EXACT_KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_prompt_and_text_can_be_joined(kind: str, data: st.DataObject) -> None:
    """Guards the space between prompt and answer, which a tokenizer leaves out of a text that it decodes alone, and
    the character that a prompt of token ids has begun."""
    tokens = data.draw(token_lists(kind))
    cut = data.draw(st.integers(0, len(tokens)))
    if kind.startswith("byte-fallback"):
        # A byte that makes a run invalid changes the text of the valid ones before it. Those of a prompt stay.
        assume(is_valid_around(tokens, cut, kind))
    assert decoded(tokens[:cut], kind) + written(tokens[cut:], kind, tokens[:cut]) == decoded(tokens, kind)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_an_unknown_decoder_takes_nothing_back(data: st.DataObject) -> None:
    """Guards tokenizers whose bytes we do not see: what waits for the next token is still there at the end."""
    kind = "bytes and more"
    tokens = data.draw(st.lists(st.sampled_from(sorted(tokenizer_of(kind).get_vocab().values())), max_size=12))
    assert written(tokens, kind) == tokenizer_of(kind).decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "text"),
    [
        ("byte-fallback", ["▁the"], ["▁cat"], " cat"),
        ("byte-fallback", ["<|im|>"], ["▁cat"], "cat"),  # nothing stands before the first word
        ("byte-fallback", ["<|im|>", "▁"], ["▁cat"], " cat"),
        ("byte-fallback", ["▁the", "<0x0A>"], ["▁cat", "<0x0A>"], " cat\n"),
        ("byte-fallback", ["<0x0A>"], ["▁cat"], " cat"),
        ("byte-fallback", ["▁the", "<0x0A>"], ["<0x80>"], "\ufffd"),  # which leaves the prompt's line break alone
        ("byte-fallback", ["▁the"], ["<0xE2>", "<0x82>", "<0xAC>", "<0xE2>"], "€"),
        ("byte-fallback", ["▁the", "<0xE2>"], ["<0x82>", "<0xAC>", "s"], "€s"),
        ("word pieces", ["the"], ["cat", "##s", ".", "n't"], " cats.n't"),
        ("word ends", ["the</w>"], ["ca", "t</w>", ".</w>"], " cat ."),
        ("metaspace", ["▁the"], ["▁cat", "\ufffd"], " cat\ufffd"),
        ("no decoder", ["a"], ["b"], " b"),
    ],
)
def test_text_follows_the_prompt(kind: str, prompt: list[str], answer: list[str], text: str) -> None:
    """Guards worked examples of the two tests above against an oracle that is wrong in the same way."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.convert_tokens_to_ids
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids(prompt + answer)
    assert written(ids(answer), kind, ids(prompt)) == text


def test_a_real_replacement_character_is_text() -> None:
    """Guards U+FFFD that the model writes against being taken for half a character: it is three bytes, or a token."""
    tokenizer = tokenizer_of("byte-level")
    half, whole = tokenizer.convert_tokens_to_ids(["ï", "ï¿½"])
    for tokens, text in [([whole], "\ufffd"), ([whole, half], "\ufffd"), ([half, half], "\ufffd")]:
        assert written(tokens, "byte-level") == text
    growing = detokenizer("byte-level").after([])
    assert growing.add(whole) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_not_decoded_again_and_again(kind: str) -> None:
    """Guards long answers: with every token a few are decoded, not all."""
    token = next(token for token in tokenizer_of(kind).get_vocab().values() if written([token], kind).isalnum())
    found, sizes = Detokenizer(tokenizer_of(kind)), []
    decode = found._decode
    found._decode = lambda tokens: (sizes.append(len(tokens)), decode(tokens))[1]
    text = found.after([])
    for _ in range(300):
        text.add(token)
    assert max(sizes, default=0) <= 2
    assert len(sizes) <= 3 * 300

"""Small tokenizers of every kind, which differ in how they write tokens as text."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END = "<|im_end|>"
WORDS = ["▁", "▁the", "▁cat", "cat", "s", "▁▁", ".", "▁'", "\ufffd", "é", "<0x0A>x", "\n"]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen: tokens are bytes, some of them of two characters, or of half ones."""
    names = bytes_to_unicode()
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [text.encode() for text in ("cat", " the", "é", "\ufffd")]
    pieces += ["€a".encode()[1:], "a€".encode()[:-1], "😀".encode()[:2]]
    vocab = {"".join(names[byte] for byte in piece): number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finished(tokenizer)


def byte_fallback(*, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """As Llama 2: words begin with a space, the first one's is left out, and what has no token is bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    words = [*WORDS[:-1], "t", "h", "e", "c", "a", "ca", "th", "the"]
    vocab |= {word: 256 + number for number, word in enumerate(words)}
    merges = [("c", "a"), ("ca", "t"), ("t", "h"), ("th", "e"), ("▁", "cat"), ("▁", "the"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(parts)
    return finished(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT: words are joined by spaces, but for `##` pieces, and for what the decoder cleans up."""
    words = ["[UNK]", "the", "cat", "##s", ".", ",", "'", "n't", "'s", "do", "not", "##\ufffd", "é"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return finished(tokenizer)


def word_ends() -> PreTrainedTokenizerFast:
    """As the first GPT: a token says whether it ends a word."""
    words = ["the</w>", "cat</w>", "ca", "t</w>", ".</w>", "é</w>"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return finished(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """As T5: words begin with a space, and there are no bytes."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return finished(tokenizer)


def plain() -> PreTrainedTokenizerFast:
    """Without a decoder: tokens are joined by spaces."""
    words = {word: number for number, word in enumerate(["a", "b", "\ufffd", "é", "x\ufffd"])}
    return finished(Tokenizer(models.WordLevel(words, unk_token="a")))


def hidden_bytes() -> PreTrainedTokenizerFast:
    """Bytes, and something more that is done to them."""
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("~", 1, 0)])
    return tokenizer


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """With special tokens, one of which has the name of an end of turn, and an added one that is no special token."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (END, "<|im|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("a é", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")


KINDS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback, metaspace": lambda: byte_fallback(metaspace=True),
    "word pieces": word_piece,
    "word ends": word_ends,
    "metaspace": metaspace,
    "no decoder": plain,
    "bytes and more": hidden_bytes,
}

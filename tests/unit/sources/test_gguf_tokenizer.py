"""Tokenizers of GGUF files give the tokens of the tokenizer that the file was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from paradraft.export.gguf_vocabulary import PROBES, metadata_of
from paradraft.formats.gguf import read_gguf
from paradraft.sources.gguf_tokenizer import built, check_same_tokens
from paradraft.sources.loading import load_tokenizer
from tests.support.gguf_files import END, ROWS, TEMPLATE, TEXT, TURN, tiny_model, tiny_tokenizer, tokens_of, write_gguf
from tests.support.small_tokenizers import byte_fallback

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As it stands in Meta's tokenizer.json."""


def trained(family: str) -> PreTrainedTokenizerFast:
    """A small tokenizer that splits text as those of a family do, with special tokens and ordinary added ones."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=family == "llama3"))
    regex = {"llama3": LLAMA3, "qwen2": QWEN2}.get(family)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)]
    if regex is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(regex), behavior="isolated"))
    if family == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(bytes_to_unicode().values()), show_progress=False,
        special_tokens=["<|begin|>", END, TURN],
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT, *PROBES * 3], trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    bos = "<|begin|>" if family == "llama3" else None
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=bos, chat_template=TEMPLATE)


FAMILIES = {"gpt-2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2", "smollm": "smollm"}


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_tokens_are_those_of_the_original(family: str, name: str) -> None:
    """Guards splits, composed characters, whole words, BOS, special and added tokens, templates and decoding; and that
    `export` finds the name of the split, which is the first one that gives the same tokens for everything."""
    original = trained(family)
    metadata = metadata_of(original, len(original) + 5, "it")
    assert metadata["tokenizer.ggml.pre"] == name
    found = built(metadata, "it")
    for text in [*PROBES, f"a{TURN}\nb<think> c {END}", "", " "]:
        tokens = original(text)["input_ids"]
        assert found(text)["input_ids"] == tokens
        assert found.decode(tokens) == original.decode(tokens)
        assert found.decode(tokens, skip_special_tokens=True) == original.decode(tokens, skip_special_tokens=True)
    talk = [{"role": "user", "content": "Grüße, 世界"}]
    assert found.apply_chat_template(talk)["input_ids"] == original.apply_chat_template(talk)["input_ids"]
    assert found.get_vocab() == original.get_vocab()
    assert (found.eos_token_id, found.bos_token_id) == (original.eos_token_id, original.bos_token_id)


def test_every_split_is_told_from_the_others() -> None:
    """The control: with another family's split the tokens of the texts that `export` tries are others."""
    for family, name in FAMILIES.items():
        metadata = metadata_of(trained(family), 700, "it")
        expected = [trained(family)(text)["input_ids"] for text in PROBES]
        for other in {*FAMILIES.values()} - {name}:
            changed = built(metadata | {"tokenizer.ggml.pre": other}, "it")
            assert [changed(text)["input_ids"] for text in PROBES] != expected


def sentencepiece(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """The metadata of a Llama 2 tokenizer: scores instead of merges."""
    tokens, _ = tokens_of(tokenizer, len(tokenizer))
    kinds = [6 if token.startswith("<0x") and token.endswith(">") else 1 for token in tokens]
    # The merges of `byte_fallback`, the best first, are c a, ca t, t h, th e, ▁ cat, ▁ the, ▁ ▁.
    best = ["ca", "cat", "th", "the", "▁cat", "▁the", "▁▁"]
    scores = [-float(best.index(token)) if token in best else -1000.0 for token in tokens]
    kinds = [3 if token in ("<|im_end|>", "<|im|>") else 4 if token in ("<think>", "a é") else kind
             for token, kind in zip(tokens, kinds, strict=True)]  # fmt: skip
    told = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()}


def test_sentencepiece_merges_follow_scores() -> None:
    """Guards Llama 2 and Mistral: bytes for what has no token, the space before a text, and the order of merges."""
    original = byte_fallback()
    found = built(sentencepiece(original), "it")
    for text in ("the cats", "the cat the  cat", " the", "cat's é\n", "a<|im_end|>the cat", "日本", ""):
        assert found(text)["input_ids"] == original(text)["input_ids"], text
        assert found.decode(found(text)["input_ids"]) == original.decode(original(text)["input_ids"])


def test_tokens_that_fill_a_vocabulary_up_are_none(tmp_path: Path) -> None:
    """Guards padded vocabularies, whose last ids must not be chosen: new files mark them, old ones only name them."""
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"))
    tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    kinds = read_gguf(str(tmp_path / "m.gguf"), vocabulary=True).metadata["tokenizer.ggml.token_type"]
    write_gguf(
        tmp_path / "old.gguf", tiny_model("qwen3"), more={"tokenizer.ggml.token_type": [*kinds[:-ROWS], *[4] * ROWS]}
    )
    assert load_tokenizer(str(tmp_path / "old.gguf")).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "splits text as 'deepseek-llm' does.*--tokenizer FOLDER_OR_ID"),
        ({"tokenizer.ggml.pre": None}, "splits text as None does.*--tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "of the kind 'bert'.*--tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "tokens without scores.*--tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer.*--tokenizer"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "the kinds of another number: it is damaged"),
        ({"tokenizer.ggml.merges": ["ab"]}, "a merge that is no pair"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    """Guards texts that would silently be split otherwise: the line says how to name the right tokenizer."""
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), more=more)
    with pytest.raises(ValueError, match=told):
        load_tokenizer(str(tmp_path / "m.gguf"))


def test_a_draft_needs_the_tokens_of_its_target_only(tmp_path: Path) -> None:
    """Guards drafts whose split is not known: ids alone are drafted. Other tokens under the same ids are refused."""
    write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), more={"tokenizer.ggml.pre": "new"})
    file, vocabulary = read_gguf(str(tmp_path / "m.gguf"), vocabulary=True), tiny_tokenizer().get_vocab()
    check_same_tokens(file, vocabulary, "it")
    first, second, *_ = vocabulary
    changed = vocabulary | {first: vocabulary[second], second: vocabulary[first]}
    with pytest.raises(ValueError, match="has other tokens than the target"):
        check_same_tokens(file, changed, "the target")


def test_a_tokenizer_without_a_name_is_not_exported() -> None:
    """Guards llama.cpp's users: a file with the name of another split would give them other tokens."""
    strange = trained("gpt-2")
    strange.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("e", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(ValueError, match=r"splits text in another way than gpt-2, .* no name for it"):
        metadata_of(strange, 700, "it")
    with pytest.raises(ValueError, match="no BPE of bytes"):
        metadata_of(byte_fallback(), 700, "it")

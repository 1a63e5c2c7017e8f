"""A corpus: its longest matches are those of a search, and it changes drafts but no text."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from paradraft import Tree
from paradraft.core import Committed, Drafting
from paradraft.drafters import drafter_config
from paradraft.drafters.parts.corpus import PIECE, Corpus, read_corpus
from paradraft.drafters.parts.match_chance import chance
from paradraft.drafters.suffix import Config, SuffixDrafter, Text, expected
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.sampling_params import GREEDY, Sampling
from paradraft.tree import ABSENT
from tests.support.decoding import started

RUNTIME = Runtime(dtype="float64", compiled=False)
PROMPTS = ["helloworld", "abcabcabc", "a"]


def common(first: list[int], second: list[int], most: int) -> int:
    """Equal tokens at the ends of two texts, at most `most`."""
    length = 0
    while length < min(len(first), len(second), most) and first[-1 - length] == second[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_matches_are_the_longest_of_a_search(depth: int) -> None:
    """Guards the sorted order and the bisection: a place that they miss is a draft that is never made. Texts of three
    different tokens match often, and over many lengths."""
    chooser, cut, beyond = random.Random(depth), 0, 0
    for _ in range(60):
        texts = [[chooser.randrange(3) for _ in range(chooser.randint(0, 40))] for _ in range(3)]
        end = [chooser.randrange(3) for _ in range(3)] + texts[0][: chooser.randint(0, 20)]
        most = chooser.choice([1, 5, 200])
        corpus = Corpus(texts, depth=depth)
        first = [1, 2 + len(texts[0]), 3 + len(texts[0]) + len(texts[1])]
        true = {
            start + at: length
            for start, text in zip(first, texts, strict=True)
            for at in range(1, len(text))
            if (length := common(text[:at], end, depth))
        }
        found = corpus.matches(end, places=most)
        assert all(true[place] == length for place, length in found)
        assert len(dict(found)) == len(found)
        assert [length for _, length in found] == sorted(true.values(), reverse=True)[:most]
        cut += most < len(true)
        beyond += any(length == depth for _, length in found)
    assert min(cut, beyond) > 20


def test_a_depth_between_powers_of_two() -> None:
    """Guards the last doubling: 3 tokens need ranks by 4."""
    corpus = Corpus([[1, 5, 7, 8, 2, 5, 7, 9, 3, 5, 7, 6]], depth=3)
    assert [(corpus.tokens[at], length) for at, length in corpus.matches([2, 5, 7], places=1)] == [(9, 3)]


def test_too_many_matches_are_taken_evenly() -> None:
    """Guards a vote of the first places alone, which are all after the same token here."""
    corpus = Corpus([[first, 90, 91, 100 + first] for first in range(40)], depth=8)
    found = [(corpus.tokens[place], length) for place, length in corpus.matches([90, 91], places=4)]
    assert found == [(token, 2) for token in (100, 110, 120, 130)]
    longer = [(corpus.tokens[place], length) for place, length in corpus.matches([20, 90, 91], places=4)]
    assert longer == [(120, 3), (100, 2), (113, 2), (127, 2)]


def test_nothing_spans_two_texts() -> None:
    """Guards against matches and continuations that no text has, and the separators against being drafted."""
    corpus = Corpus([[1, 2], [3, 4], [5], [2, 9]], depth=8)
    assert corpus.matches([2, 3], places=8) == [(5, 1)]
    assert [corpus.tokens[place] for place, _ in corpus.matches([7, 2], places=8)] == [9]
    assert Text([1]).draft(Config(), 4, None, corpus)[0].token == 2
    assert len(Text([1]).draft(Config(), 4, None, corpus)) == 1
    assert len(Corpus([[5], []], depth=8)) == 0


def test_the_better_of_both_drafts_is_taken() -> None:
    """Guards the choice: the text drafts after a match of one token here, and the corpus after one of five."""
    text = Text([8, 6, 1, 2, 3, 7, 3])
    corpus = Corpus([[2, 3, 7, 3, 9, 9, 9, 9, 9]], depth=24)
    alone = text.draft(Config(), 4, None)
    both = text.draft(Config(), 4, None, corpus)
    assert [node.token for node in alone] == [7, 3]
    assert [node.token for node in both] == [9] * 4
    unsure = Corpus([[3, token] for token in range(20, 30)], depth=24)
    assert text.draft(Config(), 4, None, unsure) == alone
    equal = Corpus([[3, 5, 5]], depth=24)
    assert expected(text.draft(Config(), 4, None, equal)) == expected(alone)
    assert text.draft(Config(), 4, None, equal) == alone


@pytest.mark.parametrize("tree", [None, Tree(budget=5), Tree(paths=((0,), (1,), (0, 0)))])
def test_values_are_chances_of_the_corpus(tree: Tree | None) -> None:
    """Guards chains, grown trees and trees of fixed ranks: 5 follows 1 in two of three texts, and 7 follows 1 5."""
    corpus = Corpus([[1, 5, 7], [1, 5, 7], [1, 6, 8]], depth=24)
    nodes = Text([4, 1]).draft(Config(), 2, tree, corpus)
    values = {(node.token, node.parent): node.value for node in nodes}
    chain = {(5, ABSENT): chance(1, 2, 3), (7, 0): chance(1, 2, 3) * chance(2, 2, 2)}
    branch = {(6, ABSENT): chance(1, 1, 3)}
    deeper = {(8, 2): chance(1, 1, 3) * chance(2, 1, 1)}
    assert values == (chain if tree is None else chain | branch | (deeper if tree.budget else {}))


def test_rows_do_not_know_each_other() -> None:
    """Guards privacy: a draft is a function of its row and the constant corpus, whatever other rows have read."""
    corpus = Corpus([[1, 2, 3, 4]], depth=24)
    rows = [[9, 1, 2], [5, 6, 7, 5, 6], [5, 6]]
    together = SuffixDrafter(Config(), corpus)
    started(together, rows)
    together.commit(Committed(tokens=[[3], [7], [7]]))
    drafts = together.propose([4, 4, 4]).tokens.tolist()
    for row, new, draft in zip(rows, ([3], [7], [7]), drafts, strict=True):
        alone = SuffixDrafter(Config(), corpus)
        alone.start(Drafting(), torch.device("cpu"))
        started(alone, [[*row, *new]])
        assert alone.propose([4]).tokens.tolist() == [[token for token in draft if token != ABSENT]]
    assert drafts[2] == [ABSENT] * len(drafts[2])


@pytest.fixture(scope="module")
def plain(family: Path) -> Engine:
    return load(str(family / "target"), runtime=RUNTIME)


@pytest.fixture
def corpora(plain: Engine, tmp_path: Path) -> dict[str, Path]:
    """The target's own answers, with which drafts are right; texts with the same words and other ends; and noise."""
    chooser = random.Random(0)
    answers = [plain.generate(prompt, max_new_tokens=30).text for prompt in PROMPTS]
    wrong = [prompt + answer[::-1] + answer[:3] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    noise = ["".join(chooser.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=2000))]
    written = {"right": [a + b for a, b in zip(PROMPTS, answers, strict=True)], "wrong": wrong, "noise": noise}
    for name, texts in written.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return {name: tmp_path / f"{name}.jsonl" for name in written}


def drafting(family: Path, drafter: str, **settings: object) -> Engine:
    return load(str(family / "target"), drafter=drafter, k=6, runtime=RUNTIME, lengths="fixed", **settings)


SHAPES: dict[str, dict[str, object]] = {
    "chain": {},
    "tree": {"tree": Tree(budget=6)},
    "rejection": {"verify": "rejection"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["right", "wrong", "noise"])
def test_text_is_that_of_plain_decoding(
    family: Path, plain: Engine, corpora: dict[str, Path], name: str, shape: str
) -> None:
    """Guards the promise of the library with any corpus, and its use with the right one."""
    samplings = [GREEDY] if shape == "rejection" else [GREEDY, Sampling(temperature=0.8, seed=3)]
    drafter = f"suffix:corpus={corpora[name]}"
    drafted, without = (drafting(family, each, **SHAPES[shape]) for each in (drafter, "suffix"))
    lengths = []
    for engine in (drafted, without):
        answers = [
            engine.generate(prompt, max_new_tokens=30, sampling=each) for prompt in PROMPTS for each in samplings
        ]
        asked = [plain.generate(prompt, max_new_tokens=30, sampling=each) for prompt in PROMPTS for each in samplings]
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in asked]
        greedy = answers[:: len(samplings)]
        lengths.append(sum(answer.stats.tokens for answer in greedy) / sum(answer.stats.rounds for answer in greedy))
    assert lengths[0] > 1.5 * lengths[1] if name == "right" else lengths[0] < 1.5 * lengths[1]


@pytest.mark.parametrize("drafter", ["suffix:corpus={}+ngram", "ngram+suffix:corpus={}"])
def test_it_is_joined_with_others(family: Path, plain: Engine, corpora: dict[str, Path], drafter: str) -> None:
    """Guards the setting's name in a union, whether its drafter comes first or last."""
    answers = [drafting(family, name).generate(PROMPTS[0], max_new_tokens=30) for name in
               (drafter.format(corpora["right"]), drafter.replace(":corpus={}", ""))]  # fmt: skip
    assert {tuple(answer.tokens) for answer in answers} == {tuple(plain.generate(PROMPTS[0], max_new_tokens=30).tokens)}
    assert answers[0].stats.rounds < answers[1].stats.rounds


@pytest.mark.parametrize("name", ["a b.txt", "a:b.txt", "c++.txt", "true", "Grüße\u2028.py"])
def test_paths(tmp_path: Path, plain: Engine, name: str) -> None:
    """Guards paths with characters that separate settings and drafters."""
    file = tmp_path / name
    file.write_text("abc", encoding="utf-8")
    assert drafter_config(f"suffix:corpus={file}:depth=3") == Config(corpus=str(file), depth=3)
    assert drafter_config(f"suffix:corpus={file}+ngram").suffix_corpus == str(file)
    assert len(read_corpus(str(file), plain.target, depth=3)) == 2


TALK = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": [{"type": "text", "text": "cde"}]}]


@pytest.mark.parametrize(
    ("record", "texts"),
    [
        ({"text": "abc", "answer": "de"}, ["abc"]),
        ({"prompt": "abc", "completion": "de"}, ["de"]),
        ({"question": "abc", "answer": "de"}, ["de"]),
        ({"prompt": "abc", "response": "de"}, ["de"]),
        ({"messages": TALK}, ["ab", "cde"]),
        ({"user": "ab", "assistant": "cde"}, ["ab", "cde"]),
    ],
)
def test_records(tmp_path: Path, plain: Engine, record: dict[str, object], texts: list[str]) -> None:
    """Guards what is read of a record: its text or its answer, or all turns of a conversation."""
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert texts_of(read_corpus(str(file), plain.target, depth=3), plain.target) == texts


def texts_of(corpus: Corpus, target: Target) -> list[str]:
    """The texts of a corpus."""
    separated = "".join("|" if token == ABSENT else target.tokenizer.decode([token]) for token in corpus.tokens)
    return separated.strip("|").split("|")


def test_conversations_are_written_by_the_template(
    tmp_path: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the tokens around an answer, by which its beginning is found and its end drafted."""
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n", encoding="utf-8")
    template = "{% for message in messages %}{{ message.role[0] + message.content + 'Z' }}{% endfor %}"
    monkeypatch.setattr(plain.target.tokenizer, "chat_template", template)
    assert texts_of(read_corpus(str(file), plain.target, depth=3), plain.target) == ["uabZacdeZ"]
    monkeypatch.setattr(plain.target.tokenizer, "chat_template", "{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match=r"corpus.jsonl, line 1: no such role: name a text file"):
        read_corpus(str(file), plain.target, depth=3)


def test_a_long_text_is_one(tmp_path: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pieces in which it is tokenized: nothing is lost between them, and matches span them."""
    assert PIECE > 1000
    monkeypatch.setattr("paradraft.drafters.parts.corpus.PIECE", 3)
    file = tmp_path / "corpus.txt"
    file.write_text("abc\ndefgh\ni\nj", encoding="utf-8")
    assert Counter(texts_of(read_corpus(str(file), plain.target, depth=3), plain.target)) == {"abc+defgh+i+j": 1}


def test_ids_that_the_target_never_chooses_are_not_drafted(
    tmp_path: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the pass: it has no embedding for them."""
    file = tmp_path / "corpus.txt"
    file.write_text("abcde", encoding="utf-8")
    monkeypatch.setattr(Target, "vocab_size", plain.target.tokenizer.convert_tokens_to_ids("e"))
    assert texts_of(read_corpus(str(file), plain.target, depth=3), plain.target) == ["abcd"]

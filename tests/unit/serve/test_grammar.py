"""Answers under a schema are JSON of it, with every drafter the same, and nobody else's answer changes."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from paradraft.drafters import branches
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.models.target import TargetFacts
from paradraft.placement import Placement
from paradraft.sampling_params import Sampling
from paradraft.serve import grammar as module
from paradraft.serve.grammar import LIMITS, MOST_SCHEMA_BYTES, Grammar, Grammars
from paradraft.text.tokenization import Detokenizer
from paradraft.tree import Tree
from tests.support.json_models import ENDS, MASK, VOCAB
from tests.support.quick import mostly_slow
from tests.support.small_tokenizers import KINDS

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "grades": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["x", None, True]},
    },
    "required": ["name", "grades", "kind"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"l": {"$ref": "#/$defs/node"}}, "additionalProperties": False}},
    "$ref": "#/$defs/node",
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "number": {"type": "number", "minimum": -3, "maximum": 250.5},
    "date": {"type": "string", "format": "date"},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}(é|€)?$"},
    "any of": {"anyOf": [{"const": {"a": [1, "é"]}}, {"type": "boolean"}, {"enum": ["cat", "the cat"]}]},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"const": 5}},
        "additionalProperties": False,
    },
    "recursive": TREE,
}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=1.5, top_k=5, repetition_penalty=1.2, seed=3),
    Sampling(temperature=1.0, min_p=0.1, frequency_penalty=0.3, logit_bias={ord("0"): 3.0, ord('"'): -4.0}, seed=4),
    *(Sampling(temperature=2.0, seed=seed) for seed in range(5, 9)),
]
RUNTIME = Runtime(dtype="float64", compiled=False, width=24)
TREES = {"chain": None, "grown": Tree(budget=9), "fixed": Tree(paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))}
DRAFTERS = ("pard", "ngram", "lookahead", "autoregressive")
CASES = [(name, shape) for name in DRAFTERS for shape in TREES if shape == "chain" or branches(name)]


@pytest.fixture(scope="module")
def engine_of(json_family: Path) -> Callable[..., Engine]:
    """Loads each drafter once."""

    @cache
    def loaded(name: str) -> Engine:
        draft = str(json_family / "pard") if name in ("pard", "autoregressive") else None
        return load(str(json_family / "target"), drafter=name, draft=draft, k=4, runtime=RUNTIME, lengths="fixed")

    def engine(name: str, shape: str = "chain", verify: str = "match", k: int = 4) -> Engine:
        made = loaded(name)
        return Engine(made.target, made.drafter, Speculation(k=k, tree=TREES[shape], verify=verify, lengths="fixed"))

    return engine


@pytest.fixture(scope="module")
def grammars(engine_of: Callable[..., Engine]) -> Grammars:
    return Grammars(engine_of("none").target.facts)


def constrained(
    sampling: Sampling, grammars: Grammars, schema: dict[str, Any], prompt: int, kind: Any = Grammar
) -> Any:
    grammar = kind(grammars.matcher(schema), prompt=prompt, eos_ids=frozenset(ENDS))
    values = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    return Sampling(**values | {"processors": [grammar]})


def answer(engine: Engine, grammars: Grammars, schema: dict[str, Any], sampling: Sampling, kind: Any = Grammar) -> Any:
    tokens = engine.prompt_tokens("hello")
    sampling = constrained(sampling, grammars, schema, len(tokens), kind)
    return engine.generate(tokens, max_new_tokens=200, sampling=sampling)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_json_of_their_schema(engine_of: Callable[..., Engine], grammars: Grammars, name: str) -> None:
    """Guards the whole promise, at every temperature and with every filter; a recursive answer may be cut."""
    schema = SCHEMAS[name]
    validator, ended, texts = jsonschema_rs.validator_for(schema, validate_formats=True), 0, set()
    for number, sampling in enumerate(SAMPLINGS):
        for rule in ("match", "rejection", "block"):
            found = answer(engine_of("pard", verify=rule), grammars, schema, sampling)
            if found.finish_reason == "eos":
                value = json.loads(found.text)
                assert validator.is_valid(value), found.text
                assert found.tokens[-1] in ENDS and not {*found.tokens[:-1]} & {*ENDS, MASK}
                ended += 1
            else:
                assert name == "recursive", (number, found.text)
            texts.add(found.text)
    assert ended >= len(SAMPLINGS) and len(texts) > 3


def test_without_a_schema_none_is_json(engine_of: Callable[..., Engine]) -> None:
    """Control of the test above: these models write no JSON by themselves."""
    for sampling in SAMPLINGS:
        text = engine_of("none").generate("hello", max_new_tokens=50, sampling=sampling).text
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


@pytest.mark.parametrize(
    ("name", "shape"), mostly_slow(CASES, quick=[case for case in CASES if case[1] == "chain" or case[0] == "pard"])
)
def test_drafters_change_no_token(engine_of: Callable[..., Engine], grammars: Grammars, name: str, shape: str) -> None:
    """Guards losslessness under a grammar, of chains and of trees, each node with a prefix of its own."""
    accepted = 0
    for schema in (PERSON, SCHEMAS["any of"]):
        for sampling in SAMPLINGS[:3]:
            wanted = answer(engine_of("none"), grammars, schema, sampling)
            found = answer(engine_of(name, shape), grammars, schema, sampling)
            assert (found.tokens, found.text, found.finish_reason) == (wanted.tokens, wanted.text, "eos")
            accepted += sum(found.accepted)
    assert accepted >= 5, "next to nothing was drafted well, so the equality shows little"


class Forgetful(Grammar):
    """Follows the tokens of a round, and never goes back."""

    def _follow(self, answer: list[int]) -> bool:
        more = answer[len(self._followed) :]
        taken = self._matcher.try_consume_tokens(more)
        self._followed += more[:taken]
        return taken == len(more) or self._matcher.is_error()


class Late(Grammar):
    """Says of every text what may follow the one before its last token."""

    def __call__(self, ids_MT: torch.Tensor, scores_MV: torch.Tensor) -> torch.Tensor:
        return super().__call__(ids_MT[:, :-1], scores_MV)


@pytest.mark.parametrize("kind", [Forgetful, Late])
@pytest.mark.parametrize("shape", ["chain", "grown"])
def test_wrong_states_are_caught(
    engine_of: Callable[..., Engine], grammars: Grammars, kind: type[Grammar], shape: str
) -> None:
    """Control: a matcher that is not brought back, or that stands a token too early, writes other text or no JSON."""
    wrong = 0
    for sampling in SAMPLINGS[:3]:
        wanted = answer(engine_of("none"), grammars, PERSON, sampling).text
        try:
            wrong += answer(engine_of("pard", shape), grammars, PERSON, sampling, kind).text != wanted
        except ValueError:
            wrong += 1
    assert wrong == 3


def test_rows_do_not_see_the_grammars_of_others(engine_of: Callable[..., Engine], grammars: Grammars) -> None:
    """Guards batches in which some answers are JSON, of different schemas, and others are texts."""
    plain = engine_of("none")
    prompts = [plain.prompt_tokens(text) for text in ("hello", "a", "the cat", "xyz", "abcabcabc", "q")]
    samplings = [SAMPLINGS[number % len(SAMPLINGS)] for number in range(6)]
    free = [
        plain.generate(prompt, max_new_tokens=40, sampling=sampling).tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    schemas = [None, PERSON, SCHEMAS["date"], None, None, TREE]

    def asked() -> list[Sampling]:
        return [
            sampling if schema is None else constrained(sampling, grammars, schema, len(prompt))
            for prompt, sampling, schema in zip(prompts, samplings, schemas, strict=True)
        ]

    alone = [
        plain.generate(prompt, max_new_tokens=40, sampling=sampling).tokens
        for prompt, sampling in zip(prompts, asked(), strict=True)
    ]
    for name, shape in (("pard", "chain"), ("pard", "grown"), ("ngram", "chain"), ("lookahead", "chain")):
        for batch_size in (3, 6):
            found = engine_of(name, shape).generate(prompts, max_new_tokens=40, sampling=asked(), batch_size=batch_size)
            assert [each.tokens for each in found] == alone
    for number, schema in enumerate(schemas):
        assert (alone[number] == free[number]) == (schema is None)


def facts(ends: frozenset[int] = frozenset(ENDS), kind: str = "byte-level") -> TargetFacts:
    return TargetFacts(tokenizer=KINDS[kind](), vocab_size=VOCAB + 4, capacity=256, eos_ids=ends)


@pytest.mark.parametrize("schema", [PERSON, {"type": "integer"}, SCHEMAS["any of"]], ids=["object", "integer", "any"])
def test_what_may_follow_is_a_function_of_the_text(schema: dict[str, Any]) -> None:
    """Guards the matcher's way back, and the kept texts: at random, a text that goes on, one that was asked about, one
    of another branch, or one that is no JSON, against a grammar that has seen no text before. The V differ too."""
    chooser, tried = random.Random(5), 0
    matcher = Grammars(facts()).matcher(schema)

    def new() -> Grammar:
        return Grammar(matcher, prompt=0, eos_ids=frozenset(ENDS))

    grammar, texts = new(), [[]]
    for _ in range(300):
        text, V = list(chooser.choice(texts[-10:])), chooser.choice([VOCAB, VOCAB + 4, VOCAB - 30])
        text = text[: len(text) - chooser.choice([0, 0, 0, 1, 4])] if chooser.random() < 0.5 else text
        found = grammar.forbidden(text, V)
        assert found.shape == (V,)
        assert np.array_equal(found, new().forbidden(text, V))
        assert found[VOCAB:].all() or not found.any()
        going_on = [token for token in np.flatnonzero(~found).tolist() if token not in ENDS and token < 256]
        if going_on:
            texts.append([*text, chooser.choice(going_on) if chooser.random() < 0.9 else chooser.randrange(256)])
            tried += 1
    assert tried > 100


def test_ends_are_allowed_where_the_json_is_complete() -> None:
    """Guards the ends: all of them, nowhere else, and after an object nothing else; an end that is also a part of texts
    ends none in the middle."""
    for ends in (ENDS, (ord("1"), 267)):
        grammar = Grammar(
            Grammars(facts(frozenset(ends))).matcher({"type": "object"}), prompt=0, eos_ids=frozenset(ends)
        )
        text = list(b'{"a": 21}' if ends == ENDS else b'{"a": 2}')
        for length in range(len(text)):
            assert grammar.forbidden(text[:length], VOCAB)[list(ends)].all()
        assert {*np.flatnonzero(~grammar.forbidden(text, VOCAB))} == {*ends}
    integer = Grammar(Grammars(facts()).matcher({"type": "integer"}), prompt=0, eos_ids=frozenset(ENDS))
    assert {*np.flatnonzero(~integer.forbidden([ord("7")], VOCAB))} == {*range(ord("0"), ord("9") + 1), *ENDS}


def test_scores_elsewhere_stay_as_they_are() -> None:
    grammar = Grammar(Grammars(facts()).matcher(PERSON), prompt=2, eos_ids=frozenset(ENDS))
    scores = torch.randn(3, VOCAB + 4)
    given = scores.clone()
    found = grammar(torch.tensor([[5, 5, ord("{")], [0, 9, ord("{")], [1, 1, ord("x")]]), scores)
    assert torch.equal(scores, given), "it changes what it is given"
    assert torch.equal(found[2], scores[2]), "a text that cannot be chosen has no say"
    is_open = found > -math.inf
    assert torch.equal(found[is_open], scores[is_open]) and torch.equal(is_open[0], is_open[1])
    assert is_open[0, : VOCAB - 5].sum() == 3 and not is_open[0, VOCAB:].any()  # a space, a line, a quotation mark


@pytest.mark.parametrize("kind", ["byte-fallback", "byte-fallback, metaspace"])
def test_other_tokenizers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tokens that are bytes in another way: what the grammar allows is what clients are shown."""
    words = ["▁", "▁the", "▁cat", "cat", "s", "▁▁", ".", '{"', "é", "\n", "true", '":']
    monkeypatch.setattr("tests.support.small_tokenizers.WORDS", words)
    tokenizer = KINDS[kind]()
    ends, size = frozenset([tokenizer.eos_token_id]), len(tokenizer)
    of = TargetFacts(tokenizer=tokenizer, vocab_size=size, capacity=256, eos_ids=ends)
    grammars, chooser, detokenizer = Grammars(of), np.random.default_rng(3), Detokenizer(tokenizer)
    for schema in (PERSON, SCHEMAS["any of"]):
        for _ in range(5):
            grammar, tokens = Grammar(grammars.matcher(schema), prompt=0, eos_ids=ends), list[int]()
            while not ends & {*tokens}:
                tokens.append(int(chooser.choice(np.flatnonzero(~grammar.forbidden(tokens, size)))))
            growing = detokenizer.after(tokenizer("a")["input_ids"])
            text = "".join(map(growing.add, tokens)) + growing.end()
            assert jsonschema_rs.is_valid(schema, json.loads(text)), text


@pytest.mark.parametrize("kind", ["word pieces", "word ends", "metaspace", "no decoder"])
def test_tokenizers_that_are_not_served(kind: str) -> None:
    grammars = Grammars(facts(kind=kind, ends=frozenset(KINDS[kind]().all_special_ids)))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^this model's tokenizer cannot be used for it: can't determine") as told:
            grammars.matcher({"type": "object"})
        assert "\n" not in str(told.value) and len(str(told.value)) < 300


def test_a_model_without_an_end() -> None:
    """Guards answers that could not end, and would fail with the last brace."""
    for ends in (frozenset[int](), frozenset([VOCAB + 3])):
        with pytest.raises(ValueError, match="no token ends its texts"):
            Grammars(facts(ends)).matcher({"type": "object"})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "foo"}, "Invalid type"),
        ({"not": {}}, "Unimplemented keys"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "maxLength": 10**12}, "regex parse error"),
        (
            {"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29, 31, 37)]},
            "fuel exhausted",
        ),
        ({"$ref": "#"}, r'no JSON fits the schema: does a "\$ref" lead back to itself'),
        ({"$ref": "#/x"}, "does not exist"),
        ({"$ref": "http://127.0.0.1:9/a"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"type": "number", "minimum": math.inf}, "expected value"),
        ({"const": "\ud800"}, "hex escape"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        (nested(130), "recursion limit"),
        (nested(5000), "nested too deeply|recursion limit"),
        ({"enum": ["a" * 2**16]}, f"bytes, use at most {MOST_SCHEMA_BYTES}"),
        ({"type": "string", "pattern": "a" * 500 + "("}, "regex parse error"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_schemas_that_cannot_be_read(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as found:
        Grammars(facts()).matcher(schema)
    assert "\n" not in str(found.value) and len(str(found.value)) <= 250


def test_options_of_the_library_are_not_those_of_a_schema() -> None:
    """Guards JSON against schemas that ask for other separators, which would make it none."""
    options = {"item_separator": ";", "whitespace_pattern": "z+", "lenient": True}
    matcher = Grammars(facts()).matcher({"type": "array", "x-guidance": options})
    assert matcher.deep_copy().try_consume_tokens(list(b"[1, 2]")) == 6
    assert matcher.deep_copy().try_consume_tokens(list(b"[1;")) == 2
    assert matcher.deep_copy().try_consume_tokens(list(b"[z")) == 1


def test_spaces_are_few() -> None:
    """Guards against answers that are all line breaks, and lets the usual styles be written."""
    matcher = Grammars(facts()).matcher({"type": "object"})
    for value in (json.dumps({"a": [1, {"b": 2}]}, indent=indent) for indent in (None, 1, 2, 4)):
        copy = matcher.deep_copy()
        assert copy.try_consume_tokens(list(value.encode())) == len(value) and copy.is_accepting()
    assert matcher.deep_copy().try_consume_tokens(list(b"{" + b"\n" * 9)) == 3


def test_more_than_the_library_can_do(engine_of: Callable[..., Engine], grammars: Grammars) -> None:
    """Guards answers that come to a place where the library gives up: they fail with its reason, with a drafter and
    without one, and it is no worse for the next text."""
    many = {"type": "object", "properties": {f"p{number}": {} for number in range(700)}}
    for name in ("none", "pard"):
        engine = engine_of(name)
        tokens = engine.prompt_tokens("hello")
        sampling = constrained(Sampling(temperature=1.0, seed=1), grammars, many, len(tokens))
        with pytest.raises(ValueError, match="forbids every token"):
            engine.generate(tokens, max_new_tokens=50, sampling=sampling)
        (grammar,) = sampling.processors
        assert grammar.dead_end is not None and "Current row has" in grammar.dead_end
        assert grammar.forbidden([], VOCAB).sum() == VOCAB - 1


def test_texts_that_are_kept_are_few() -> None:
    """Guards the memory of long answers."""
    grammar = Grammar(Grammars(facts()).matcher({"type": "string"}), prompt=0, eos_ids=frozenset(ENDS))
    text = [ord('"')]
    for _ in range(300):
        grammar.forbidden(text, VOCAB)
        text.append(ord("a"))
    assert len(grammar._known) == module.KEPT_TEXTS and LIMITS.max_lexer_states == 50_000


@pytest.mark.parametrize("place", [None, pytest.param(Placement(draft_cpus=(0,)), marks=pytest.mark.slow)])
def test_drafters_that_run_ahead(
    json_family: Path, engine_of: Callable[..., Engine], grammars: Grammars, place: Placement | None
) -> None:
    """Guards grammars that two threads ask, and those that another process cannot have: the text is the same."""
    more = {} if place is None else {"placement": place}
    with (
        warnings.catch_warnings(record=True) as told,
        load(
            str(json_family / "target"),
            drafter="autoregressive",
            draft=str(json_family / "pard"),
            gamma=3,
            runtime=RUNTIME,
            **more,
        ) as engine,
    ):
        warnings.simplefilter("always")
        for sampling in SAMPLINGS[:3]:
            wanted = answer(engine_of("none"), grammars, PERSON, sampling)
            assert answer(engine, grammars, PERSON, sampling).tokens == wanted.tokens
    assert any("such as a grammar" in str(warning.message) for warning in told) == (place is not None)

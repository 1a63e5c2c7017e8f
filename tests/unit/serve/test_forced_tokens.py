"""Forced tokens are those that the masks of a grammar allow alone; compact JSON has more of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from openai import OpenAI

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.models.target import TargetFacts
from paradraft.sampling_params import ForcingProcessor
from paradraft.serve.grammar import Grammar, Grammars
from paradraft.sources.loading import load_tokenizer, pocket_folder
from tests.support.json_models import VOCAB
from tests.support.serving import MODEL, Serving, serving
from tests.unit.serve.test_grammar import SCHEMAS, facts
from tests.unit.serve.test_limits import error_of
from tests.unit.serve.test_mistakes import CHAT, TEXT, USER

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": SCHEMAS["object"], "minItems": 1, "maxItems": 2}},
    "required": ["items"],
    "additionalProperties": False,
}
KEYS: dict[str, Any] = {
    "type": "object",
    "properties": {"identifier": {"type": "integer"}, "description": {"type": "string", "maxLength": 4}},
    "required": ["identifier", "description"],
    "additionalProperties": False,
}
FIVE = {name: SCHEMAS[name] for name in ("object", "date", "any of")} | {"nested": NESTED, "keys": KEYS}
COMPACT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def pocket() -> TargetFacts:
    """Of a tokenizer with long tokens, many of which begin or end with a quotation mark."""
    tokenizer = load_tokenizer(str(pocket_folder("target")))
    ends = frozenset([tokenizer.eos_token_id])
    return TargetFacts(tokenizer=tokenizer, vocab_size=len(tokenizer), capacity=256, eos_ids=ends)


def walks(grammar: Grammar, facts: TargetFacts, seed: int) -> Iterator[list[int]]:
    """The beginnings of a random answer, at most 60 tokens long."""
    chooser, answer = random.Random(seed), list[int]()
    while len(answer) < 60 and not facts.eos_ids & {*answer}:
        yield list(answer)
        allowed = np.flatnonzero(~grammar.forbidden(answer, facts.vocab_size)).tolist()
        answer.append(chooser.choice(allowed))


@pytest.mark.parametrize("name", FIVE)
def test_without_guesses_they_are_all_that_is_allowed(pocket: TargetFacts, name: str) -> None:
    """Guards the answers of llguidance against the masks: a forced token is the only one of its mask, and the only
    token of a mask is forced, but for ends."""
    grammars, certain = Grammars(pocket), 0
    matcher = grammars.matcher(FIVE[name])
    for seed in range(6):
        grammar = grammars.grammar(matcher, prompt=0, is_compact=False)
        assert isinstance(grammar, ForcingProcessor)
        for answer in walks(grammars.grammar(matcher, prompt=0, is_compact=False), pocket, seed):
            tokens = grammar.forced(answer, 8)
            assert grammar.forced(answer, 2) == tokens[:2]
            for place, token in enumerate(tokens):
                allowed = np.flatnonzero(~grammar.forbidden(answer + tokens[:place], pocket.vocab_size))
                assert allowed.tolist() == [token]
            allowed = np.flatnonzero(~grammar.forbidden(answer, pocket.vocab_size)).tolist()
            if len(allowed) == 1 and allowed[0] not in pocket.eos_ids:
                assert tokens[:1] == allowed
            certain += len(tokens)
    assert certain > 5


@pytest.mark.parametrize("name", FIVE)
def test_compact_ones_are_the_only_text(pocket: TargetFacts, name: str) -> None:
    """Guards the last token, which may be a guess: every token that a mask allows beside it has the same text, as far
    as either goes."""
    grammars, guessed, certain = Grammars(pocket), 0, 0
    matcher = grammars.matcher(FIVE[name], is_compact=True)
    tokenizer = grammars._cached_tokenizer()
    for seed in range(6):
        grammar = grammars.grammar(matcher, prompt=0, is_compact=True)
        for answer in walks(grammars.grammar(matcher, prompt=0, is_compact=True), pocket, seed):
            tokens = grammar.forced(answer, 8)
            for place, token in enumerate(tokens):
                allowed = np.flatnonzero(~grammar.forbidden(answer + tokens[:place], pocket.vocab_size)).tolist()
                assert token in allowed
                rest = tokenizer.decode_bytes(tokens[place:])
                for other in allowed:
                    text = tokenizer.decode_bytes([other])
                    assert text.startswith(rest) or rest.startswith(text)
                guessed, certain = guessed + (len(allowed) > 1), certain + (len(allowed) == 1)
            allowed = np.flatnonzero(~grammar.forbidden(answer, pocket.vocab_size)).tolist()
            if len(allowed) == 1 and allowed[0] not in pocket.eos_ids:
                assert tokens[:1] == allowed
    assert certain > 5 and (guessed > 5) == (FIVE[name].get("type") == "object")


def test_other_texts_force_nothing() -> None:
    """Guards texts that are no JSON, ended ones, and errors of the library: what may follow other texts is the same."""
    grammars = Grammars(facts())
    matcher = grammars.matcher(NESTED, is_compact=True)

    def new() -> Grammar:
        return grammars.grammar(matcher, prompt=0, is_compact=True)

    grammar, begun = new(), list(b'{"items":[')
    assert grammar.forced([], 40) == [*begun, *b'{"name":"']
    assert grammar.forced([*begun, ord("x")], 4) == [] == grammar.forced([ord("x")], 4)
    whole = list(b'{"items":[{"name":"","grades":[],"kind":"x"}]}')
    assert grammar.forced(whole, 4) == [] == grammar.forced([*whole, 267], 4) == grammar.forced([*whole, 267, 267], 4)
    grammar._matcher.consume_token(ord("x"))
    assert grammar._matcher.is_error()
    assert grammar.forced(begun, 4) == []
    assert grammar.forced(begun, 4) == list(b'{"na') and grammar.dead_end is None
    for text in ([], begun, [ord("x")], whole):
        assert np.array_equal(grammar.forbidden(text, VOCAB), new().forbidden(text, VOCAB))


def test_compact_json_has_no_whitespace() -> None:
    """Guards the option: none between parts, and any in strings."""
    value = json.dumps({"a b": [1, {"c": "x  y"}]}, separators=(",", ":"))
    for is_compact in (False, True):
        matcher = Grammars(facts()).matcher({"type": "object"}, is_compact=is_compact)
        assert matcher.deep_copy().try_consume_tokens(list(value.encode())) == len(value)
        assert matcher.deep_copy().try_consume_tokens(list(b'{ "a" : 1 }')) == (1 if is_compact else 11)


@pytest.fixture(scope="module")
def forcing(json_family: Path) -> Iterator[Serving]:
    runtime = Runtime(dtype="float64", compiled=False)
    engine = load(str(json_family / "target"), drafter="forced", k=4, runtime=runtime, lengths="fixed")
    with serving(engine, max_batch=3, max_queue=40, max_new_tokens=200) as running:
        yield running


def asked(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": form, "structured_outputs": COMPACT} | more


def test_a_server_that_drafts_them(forcing: Serving, json_engine: Engine) -> None:
    """Guards the way from a request to the drafter: texts are those without drafts, in fewer rounds, in both APIs."""
    client: OpenAI = forcing.client()
    for seed in range(2):
        more: dict[str, Any] = {"model": MODEL, "max_tokens": 150, "seed": seed}
        texts, rounds = set(), {}
        for speculation in ("off", None):
            extra = asked(NESTED, speculation=speculation, paradraft=True)
            chunks = list(client.completions.create(**more, prompt="hello", stream=True, extra_body=extra))
            texts.add("".join(chunk.choices[0].text for chunk in chunks))
            rounds[speculation] = len(chunks)
        (text,) = texts
        assert rounds[None] < 0.7 * rounds["off"]
        assert jsonschema_rs.is_valid(NESTED, json.loads(text))
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text
    (choice,) = client.chat.completions.create(**more, messages=USER, extra_body=asked(NESTED)).choices
    assert jsonschema_rs.is_valid(NESTED, json.loads(choice.message.content or ""))
    assert any(chunk.model_extra["paradraft"]["accepted"] for chunk in chunks)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"structured_outputs": COMPACT}, "structured_outputs"),
        ({"structured_outputs": COMPACT, "response_format": {"type": "text"}}, "structured_outputs"),
        (asked({}, structured_outputs={"disable_any_whitespace": "yes"}), "structured_outputs.disable_any_whitespace"),
        (asked({}, structured_outputs={"whitespace_pattern": "z+"}), "structured_outputs.whitespace_pattern"),
        (asked({}, structured_outputs="compact"), "structured_outputs"),
    ],
)
def test_mistakes(forcing: Serving, given: dict[str, Any], param: str) -> None:
    """Guards users: one line that names the parameter."""
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": USER})):
        refused = forcing.post(path, body | given)
        assert (refused.status_code, error_of(refused)["param"]) == (400, param)
        message = error_of(refused)["message"]
        assert message.startswith("structured_outputs") and "\n" not in message and len(message) < 120


def test_the_option_may_be_off(forcing: Serving) -> None:
    """Guards clients that send all options."""
    off = {"structured_outputs": {"disable_any_whitespace": False}}
    for more in (off, {"structured_outputs": None}, {"structured_outputs": {}}):
        assert forcing.post(TEXT, {"prompt": "a", "max_tokens": 2} | more).status_code == 200


def test_only_compact_answers_guess(forcing: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafts of flexible JSON against guesses that are nearly always wrong, and compact ones against none."""
    compact, original = list[bool](), Grammars.grammar

    def noted(grammars: Grammars, matcher: Any, *, prompt: int, is_compact: bool) -> Grammar:
        compact.append(is_compact)
        return original(grammars, matcher, prompt=prompt, is_compact=is_compact)

    monkeypatch.setattr(Grammars, "grammar", noted)
    for more in ({}, {"structured_outputs": None}):
        assert forcing.post(TEXT, {"prompt": "a", "max_tokens": 2} | asked(KEYS, **more)).status_code == 200
    assert compact == [True, False]

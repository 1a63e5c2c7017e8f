"""`response_format` over HTTP: JSON objects and schemas, beside everything else that a request may ask for."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI
from pydantic import BaseModel

from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from paradraft.serve.grammar import Grammar, Grammars
from paradraft.serve.schemas import ResponseFormat
from tests.support.json_models import ENDS
from tests.support.serving import MODEL, Serving
from tests.unit.serve.test_grammar import PERSON
from tests.unit.serve.test_limits import error_of
from tests.unit.serve.test_mistakes import CHAT, TEXT, USER

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 150}


@pytest.fixture(scope="module")
def client(json_running: Serving) -> OpenAI:
    return json_running.client()


def offline(engine: Engine, tokens: list[int], stop: object = (), **settings: Any) -> Any:
    """What the engine answers without a drafter."""
    matcher = Grammars(engine.target.facts).matcher(PERSON)
    grammar = Grammar(matcher, prompt=len(tokens), eos_ids=frozenset(ENDS))
    sampling = Sampling(**{"temperature": 1.0} | settings, processors=[grammar])
    return engine.generate(tokens, max_new_tokens=150, sampling=sampling, stop=stop)


def schema(**given: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}


def completed(client: OpenAI, given: object = FORMAT, speculation: object = None, **asked: Any) -> Any:
    """What comes of a request for a text, for which OpenAI's client knows no format."""
    more = {} if given is None else {"response_format": given}
    return client.completions.create(**ASKED | asked, extra_body=more | {"speculation": speculation})


def text_of(client: OpenAI, stream: bool, **asked: Any) -> tuple[str, str | None]:
    """The text of a completion, and why it has ended."""
    if not stream:
        (choice,) = completed(client, **asked).choices
        return choice.text, choice.finish_reason
    chunks = [chunk.choices[0] for chunk in completed(client, **asked, stream=True)]
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_with_and_without_speculation(json_engine: Engine, client: OpenAI, stream: bool) -> None:
    """Guards the promise: one seed has one text, whatever is drafted, and that is JSON of the schema."""
    texts = set()
    for seed in range(4):
        wanted = offline(json_engine, json_engine.prompt_tokens("hello"), seed=seed)
        for speculation in ("off", 1, 4):
            found = text_of(client, stream, prompt="hello", seed=seed, speculation=speculation)
            assert found == (wanted.text, "stop")
        assert jsonschema_rs.is_valid(PERSON, json.loads(wanted.text))
        texts.add(wanted.text)
    assert len(texts) == 4


def test_many_at_once(json_engine: Engine, client: OpenAI) -> None:
    """Guards a batch of answers of which some are JSON of some schema, in threads that come and go."""
    schemas: list[Any] = [None, PERSON, {"type": "integer", "maximum": 10**6}, {"enum": ["cat", "the cat"]}]

    def answered(number: int) -> str:
        wanted = schemas[number % 4]
        asked = {"prompt": "ab", "max_tokens": 120, "seed": number % 8, "temperature": 0.8}
        return completed(client, None if wanted is None else schema(**wanted), **asked).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(answered, range(24)))
    assert found[:8] == found[8:16] == found[16:]
    for number, text in enumerate(found[:8]):
        if number % 4:
            assert jsonschema_rs.is_valid(schemas[number % 4], json.loads(text))
        else:
            sampling = Sampling(temperature=0.8, seed=number)
            assert text == json_engine.generate("ab", max_new_tokens=120, sampling=sampling).text


def test_objects(client: OpenAI) -> None:
    """Guards `json_object`, in conversations and in texts: an object, and never another value."""
    given: Any = {"type": "json_object"}
    bias = {str(ord("}")): 6.0, str(ord('"')): 4.0}
    for seed in range(4):
        asked: dict[str, Any] = {"model": MODEL, "seed": seed, "max_tokens": 200, "logit_bias": bias}
        chat = client.chat.completions.create(**asked, messages=USER, response_format=given)
        text = completed(client, given, **asked, prompt="a")
        for content, reason in (
            (chat.choices[0].message.content, chat.choices[0].finish_reason),
            (text.choices[0].text, text.choices[0].finish_reason),
        ):
            assert reason == "stop" and isinstance(json.loads(content or ""), dict)


def test_choices_stops_limits_and_probabilities(json_engine: Engine, client: OpenAI) -> None:
    """Guards what a request may ask for beside a format: each choice has a grammar of its own, a stop string and a
    limit cut, and probabilities are the target's own."""
    tokens = json_engine.prompt_tokens("xyz")
    choices = completed(client, prompt=["xyz", "q"], n=3, seed=40, logprobs=2).choices
    wanted = [offline(json_engine, tokens, seed=40 + number) for number in range(3)]
    assert [choice.text for choice in choices[:3]] == [each.text for each in wanted]
    assert all(jsonschema_rs.is_valid(PERSON, json.loads(choice.text)) for choice in choices)
    logprobs = choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(wanted[0].tokens)
    # The first token must be a brace; the target thinks of others too.
    assert logprobs.tokens[0] == "{" and logprobs.token_logprobs[0] < -0.5
    (cut,) = completed(client, max_tokens=5, prompt="xyz", seed=40).choices
    assert cut.finish_reason == "length" and wanted[0].text.startswith(cut.text)
    stop = '"grades"'
    (stopped,) = completed(client, prompt="xyz", seed=40, stop=stop).choices
    assert (stopped.text, stopped.finish_reason) == (wanted[0].text.partition(stop)[0], "stop")


def test_by_the_client_of_openai(client: OpenAI) -> None:
    """Guards what OpenAI's own client sends for a class of pydantic's, and what it reads of the answer."""

    class Person(BaseModel):
        name: bool
        age: None

    found = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Person, seed=3, max_tokens=150)
    assert isinstance(found.choices[0].message.parsed, Person)


def test_texts_are_texts(json_engine: Engine, client: OpenAI) -> None:
    (choice,) = completed(client, {"type": "text"}, prompt="hello", max_tokens=12, seed=1).choices
    wanted = json_engine.generate("hello", max_new_tokens=12, sampling=Sampling(temperature=1.0, seed=1))
    assert choice.text == wanted.text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_object", "json_schema": FORMAT["json_schema"]}, "response_format"),
        ({"type": "text", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "y": 1}}, "response_format.json_schema.y"),
        (schema(type="strange"), "response_format"),
        (schema(type="string", pattern="("), "response_format"),
        (schema(enum=["a" * 70_000]), "response_format"),
        (schema(**{"$ref": "https://example.com"}), "response_format"),
    ],
)
def test_mistakes(json_running: Serving, given: object, param: str) -> None:
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": USER})):
        for stream in (False, True):
            refused = json_running.post(path, body | {"response_format": given, "stream": stream})
            assert (refused.status_code, error_of(refused)["param"]) == (400, param)
            assert len(error_of(refused)["message"]) < 300
    assert json_running.admission.is_idle and json_running.admission.waiting == 0


def test_biases_that_forbid(json_running: Serving) -> None:
    """Guards against a token that the answer needs and may not have: JSON knows no infinity but by its size."""
    body = b'{"prompt": "a", "logit_bias": {"123": -1e999}, "response_format": {"type": "json_object"}}'
    refused = json_running.post_bytes(TEXT, body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "logit_bias")
    plain = json_running.post_bytes(TEXT, body.replace(b"json_object", b"text"))
    assert plain.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_found_out_in_the_middle(json_running: Serving, stream: bool) -> None:
    """Guards schemas that can be read and are too much for the grammar later: that is no error of the server's."""
    many = schema(type="object", properties={f"p{number}": {} for number in range(700)})
    answer = json_running.post(TEXT, {"prompt": "a", "response_format": many, "stream": stream, "seed": 1})
    if stream and answer.status_code == 200:
        error = json.loads(answer.text.strip().rpartition("data: ")[2])["error"]
    else:
        assert answer.status_code == 400
        error = error_of(answer)
    assert error["param"] == "response_format" and "Current row has" in error["message"]
    assert json_running.ended("error") >= 1
    assert json_running.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_model_whose_tokens_are_no_bytes(running: Serving) -> None:
    """Guards requests to a model with which no JSON can be asked for: they are refused, and say why."""
    refused = running.post(TEXT, {"prompt": "a", "response_format": {"type": "json_object"}})
    assert refused.status_code == 400 and "tokenizer cannot be used" in error_of(refused)["message"]


def test_schemas_of_formats() -> None:
    """Guards which schema an answer has."""
    assert ResponseFormat(type="text").schema_of_answers is None
    assert ResponseFormat(type="json_object").schema_of_answers == {"type": "object"}
    assert ResponseFormat.model_validate(FORMAT).schema_of_answers == PERSON

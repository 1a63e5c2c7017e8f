"""The document at /openapi.json tells the truth, and no request, random or wrong, is a server's error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.serve import endpoint
from paradraft.serve.app import new_app
from paradraft.serve.chat import ChatCompletionRequest
from paradraft.serve.completions import CompletionRequest
from paradraft.serve.limits import Limits
from paradraft.serve.schemas import IGNORED, NOT_SERVED
from tests.support.serving import MODEL, Serving, serving, until
from tests.unit.serve.test_limits import Gate
from tests.unit.serve.test_mistakes import CHAT, TEXT, USER, anything
from tests.unit.serve.test_response_format import FORMAT

KEY = "a-key"
FOUND_OUT_LATER = (
    "stream_options is for streams", "top_logprobs is for logprobs", "max_tokens is the old name", "response_format: ",
    "the last message is the assistant's", "logit_bias: ", "the model has room for", "seed=", "the request asks for",
    "chat_template_kwargs: ", "the body is longer", "messages[", "tools: ", "tools[", "tool_choice: ",
    "structured_outputs is for",
)  # fmt: skip
"""What is refused although the document allows it: parameters that do not go together, and what does not fit."""
FIXED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(scope="module")
def fuzzed(json_engine: Engine) -> Iterator[Serving]:
    with serving(
        json_engine, max_batch=3, max_queue=3, max_body_bytes=200_000, max_new_tokens=8, timeout_s=30
    ) as found:
        yield found


@pytest.fixture(scope="module")
def written(fuzzed: Serving) -> dict[str, Any]:
    return httpx2.get(f"{fuzzed.url}/openapi.json").json()


def within(document: dict[str, Any], name: str) -> jsonschema_rs.Validator:
    """Compares with one of the schemas of a document."""
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


class Conformance:
    """Compares responses with what a document says of them."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators = {name: within(document, name) for name in document["components"]["schemas"]}
        self.events = 0

    def check(self, response: httpx2.Response, path: str, method: str = "post") -> None:
        """Raises AssertionError where it is something else."""
        told = self._document["paths"][path][method]["responses"]
        assert str(response.status_code) in told, response.text
        said = told[str(response.status_code)]
        assert all(name in response.headers for name in said.get("headers", ()))
        kind = response.headers.get("content-type", "").partition(";")[0]
        assert kind in said.get("content", {"": None})
        if kind == "application/json":
            (name,) = said["content"][kind]["schema"].values()
            self._validate(name.rpartition("/")[2], response.json())
        elif kind == "text/event-stream":
            *events, end, rest = response.text.split("\n\n")
            piece = said["content"][kind]["itemSchema"]["properties"]["data"]["anyOf"][1]["contentSchema"]["$ref"]
            assert rest == "" and events
            for event in events:
                self._validate(piece.rpartition("/")[2], json.loads(event.removeprefix("data: ")))
                self.events += 1
            if end != "data: [DONE]":
                self._validate("Error", json.loads(end.removeprefix("data: ")))

    def _validate(self, name: str, value: object) -> None:
        wrong = next(self._validators[name].iter_errors(value), None)
        assert wrong is None, f"{wrong} in {json.dumps(value)[:500]}"


def test_it_describes_what_there_is(json_engine: Engine, fuzzed: Serving, written: dict[str, Any]) -> None:
    """Guards addresses, parameters and limits against a document that was forgotten."""
    schemathesis.openapi.from_dict(written).validate()
    app, _ = new_app(json_engine, names=[MODEL], limits=Limits(), key=None)
    routes = {route.path_format: {*route.methods} - {"HEAD"} for route in app.routes if isinstance(route, Route)}
    assert {path: {method.upper() for method in told} for path, told in written["paths"].items()} == routes
    for schema in (CompletionRequest, ChatCompletionRequest):
        told = written["components"]["schemas"][schema.__name__]["properties"]
        assert {*told} == {*schema.model_fields, *IGNORED, *NOT_SERVED}
        assert not [name for name, given in told.items() if given in ({}, {"type": "object"})]
    assert "http" not in json.dumps(written).replace('"http"', ""), "it names addresses elsewhere"
    assert "securitySchemes" not in written["components"]
    with serving(json_engine, key=KEY, defaults={"temperature": 0.6, "top_k": 7}) as guarded:
        found = httpx2.get(f"{guarded.url}/openapi.json").json()
    for document, temperature, top_k in ((written, 1.0, 0), (found, 0.6, 7)):
        for schema in ("CompletionRequest", "ChatCompletionRequest"):
            told = document["components"]["schemas"][schema]["properties"]
            assert (told["temperature"]["default"], told["top_k"]["default"]) == (temperature, top_k)
    assert found["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert "401" in found["paths"][TEXT]["post"]["responses"] and "security" not in found["paths"]["/health"]["get"]


def test_an_engine_that_drafts_ahead(json_family: Path) -> None:
    """Guards what such an engine refuses: lengths of drafts, and log probabilities."""
    target, draft = str(json_family / "target"), str(json_family / "pard")
    runtime = Runtime(dtype="float64", compiled=False)
    with (
        load(target, drafter="autoregressive", draft=draft, gamma=3, runtime=runtime) as engine,
        serving(engine) as ahead,
    ):
        document = httpx2.get(f"{ahead.url}/openapi.json").json()
        for path, schema, body in (
            (TEXT, "CompletionRequest", {"prompt": "a"}),
            (CHAT, "ChatCompletionRequest", {"messages": USER}),
        ):
            validator = within(document, schema)
            logprobs: Any = True if path == CHAT else 1
            for more in ({}, {"speculation": None}, {"speculation": 2}, {"speculation": "off"}, {"logprobs": logprobs}):
                is_allowed = validator.is_valid(body | more)
                found = ahead.post(path, body | more | {"max_tokens": 3})
                assert (found.status_code == 200) == is_allowed == (more in ({}, {"speculation": None}))


@pytest.mark.parametrize(("path", "schema"), [(TEXT, "CompletionRequest"), (CHAT, "ChatCompletionRequest")])
def test_what_it_allows_and_what_not(written: dict[str, Any], path: str, schema: str) -> None:
    """Guards the schemas of requests at their edges, which random values seldom meet."""
    good: dict[str, Any] = {"prompt": "a"} if path == TEXT else {"messages": USER}
    validator = within(written, schema)
    for more in (
        {}, {"n": 6}, {"seed": -(2**63)}, {"temperature": 0}, {"temperature": 0.5, "top_p": 1}, {"top_p": None},
        {"logit_bias": {"0": 3}}, {"stop": ["a"] * 4}, {"speculation": "off"}, {"speculation": 4}, {"tools": []},
        {"response_format": FORMAT}, {"nonsense": None}, {"max_tokens": 8}, {"stream": True}, {"model": MODEL},
    ):  # fmt: skip
        assert validator.is_valid(good | more), more
    for more in (
        {"n": 0}, {"n": 7}, {"seed": 2**63}, {"temperature": 1e-7}, {"temperature": -1}, {"temperature": 1e39},
        {"top_p": 0}, {"min_p": 1.1},
        {"logit_bias": {"05": 3}}, {"logit_bias": {"5": 1e5}}, {"stop": ["a"] * 5}, {"stop": ""}, {"speculation": 5},
        {"response_format": {"type": "xml"}}, {"nonsense": 1}, {"max_tokens": 9}, {"model": "x"}, {"tools": [{}]},
        {"prompt": []}, {"messages": []}, {"prompt": [268]}, {"logprobs": 21}, {"top_logprobs": 21},
    ):  # fmt: skip
        assert not validator.is_valid(good | more), more


@pytest.mark.parametrize(
    "examples", [pytest.param(24, id="quick"), pytest.param(1500, id="long", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_it_allows_is_answered(fuzzed: Serving, written: dict[str, Any], path: str, examples: int) -> None:
    """Guards a document that allows too much, and answers and events of every kind of request."""
    conformance, statuses = Conformance(written), list[int]()
    operation = schemathesis.openapi.from_dict(written)[path]["POST"]

    with httpx2.Client(timeout=20) as client:

        @settings(FIXED, max_examples=examples)
        @given(case=operation.as_strategy())
        def answered(case: schemathesis.Case) -> None:
            for stream in (False, True):
                body = json.dumps(case.body | {"stream": stream}).encode()
                found = client.post(f"{fuzzed.url}{path}", content=body, headers={"Content-Type": "application/json"})
                conformance.check(found, path)
                statuses.append(found.status_code)
                if found.status_code != 200:
                    assert found.status_code in (400, 413)
                    assert found.json()["error"]["message"].startswith(FOUND_OUT_LATER), found.text

        answered()
    assert min(statuses.count(200), conformance.events) > examples / 8


def run(
    serving: Serving, folder: Path, phases: str, examples: int, key: str | None = None
) -> subprocess.CompletedProcess[str]:
    """All checks of schemathesis but that of acceptance, which is made above."""
    command = [
        sys.executable, "-c", "import schemathesis.cli; schemathesis.cli.schemathesis()", "run",
        f"{serving.url}/openapi.json", f"--phases={phases}", f"--max-examples={examples}",
        "--generation-deterministic", "--exclude-checks=positive_data_acceptance", "--no-color",
        "--request-timeout=20", "--continue-on-failure",
    ]  # fmt: skip
    command += [] if key is None else ["-H", f"Authorization: Bearer {key}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=550, check=False)


def test_schemathesis_finds_nothing(fuzzed: Serving, tmp_path: Path) -> None:
    """Guards every address against 500s, undocumented statuses, headers, types and bodies, and wrong requests that are
    taken: some at random."""
    found = run(fuzzed, tmp_path, "fuzzing", 10)
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY])
def test_schemathesis_finds_nothing_for_long(json_engine: Engine, tmp_path: Path, key: str | None) -> None:
    """The same with the edges of all parameters and many random requests, with a key too, which it also leaves out."""
    limits = {"max_batch": 3, "max_queue": 3, "max_body_bytes": 500_000, "max_new_tokens": 8}
    with serving(json_engine, key=key, **limits) as running:
        found = run(running, tmp_path, "coverage,fuzzing", 300, key)
    assert found.returncode == 0, found.stdout


values = anything | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 1e308, "", "\ud800", "off", FORMAT, [1], {"a": 1}])
parameters = st.sampled_from(sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}))
requests = st.builds(
    lambda body, more: body | more,
    st.sampled_from([{"prompt": "a"}, {"prompt": [5, 6]}, {"messages": USER}]),
    st.dictionaries(parameters, values, max_size=3),
)
keywords = st.sampled_from(["type", "properties", "items", "enum", "pattern", "anyOf", "$ref", "minimum", "maxLength"])
words = st.sampled_from(["object", "array", "string", "integer", "#", "(a|b)*", {}, [], {"a": {"$ref": "#"}}, 5, -1])
formats = st.dictionaries(keywords, words | values, max_size=3).map(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
)
bodies = st.one_of(
    st.binary(max_size=40),
    st.one_of(anything, requests, formats.map(lambda form: {"prompt": "a", "response_format": form})).map(
        lambda body: json.dumps(body).encode()
    ),
)


def attack(running: Serving, written: dict[str, Any], examples: int) -> set[int]:
    """Sends random bodies; the statuses that were met."""
    conformance, statuses = Conformance(written), set[int]()
    with httpx2.Client(timeout=20) as client:

        @settings(FIXED, max_examples=examples)
        @given(body=bodies, path=st.sampled_from([TEXT, CHAT]))
        def attacked(body: bytes, path: str) -> None:
            found = client.post(f"{running.url}{path}", content=body, headers={"Content-Type": "application/json"})
            conformance.check(found, path)
            assert found.status_code != 500, body
            statuses.add(found.status_code)

        attacked()
    assert running.admission.is_idle and (running.admission.running, running.admission.waiting) == (0, 0)
    return statuses


@pytest.mark.parametrize(
    "examples", [pytest.param(200, id="quick"), pytest.param(8000, id="long", marks=pytest.mark.slow)]
)
def test_random_bodies(fuzzed: Serving, written: dict[str, Any], examples: int) -> None:
    """Guards the reading of what is no JSON, no object, or no request, and schemas that are none."""
    assert {200, 400} <= attack(fuzzed, written, examples)


def failing(_: object) -> Any:
    raise KeyError("x")


def other_envelope(*given: Any, **more: Any) -> Any:
    return {"id": "x"}


@pytest.mark.parametrize("fault", [("read", failing), ("whole", other_envelope), ("usage", failing)])
def test_faults_are_noticed(
    json_engine: Engine, written: dict[str, Any], fault: tuple[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: an error while a request is read or answered, and an answer of another shape, fail the tests above."""
    name, wrong = fault
    monkeypatch.setattr(endpoint, name, (lambda body, schema: failing(body)) if name == "read" else wrong)
    with serving(json_engine, max_batch=3, max_queue=3, max_new_tokens=8) as running, pytest.raises(AssertionError):
        attack(running, written, 600)


@pytest.fixture
def gate(json_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(json_engine, monkeypatch)
    yield found
    found.open()
    until(lambda: not json_engine._scheduler._is_watching)


def test_statuses_that_are_seldom(
    json_engine: Engine, gate: Gate, written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what no random request leads to: full queues, late answers, ends, keys, types, sizes, hosts, methods."""
    conformance, met = Conformance(written), set[int]()
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 4}

    def check(
        found: httpx2.Response, status: int, path: str = TEXT, method: str = "post", of: Any = conformance
    ) -> None:
        of.check(found, path, method)
        assert found.status_code == status
        met.add(status)

    with serving(json_engine, timeout_s=0.2) as running:
        check(running.post(TEXT, body), 408)
    gate.open()
    with serving(json_engine, max_batch=1, max_queue=0, max_body_bytes=100) as running:
        url = f"{running.url}{TEXT}"
        with monkeypatch.context() as patch:
            patch.setattr(running.admission, "running", 1)
            check(running.post(TEXT, body), 429)
        check(running.post(TEXT, body | {"prompt": "a" * 200}), 413)
        check(running.post(TEXT, body | {"model": "x"}), 404)
        check(httpx2.post(url, content=b"{}", headers={"Content-Type": "text/plain"}), 415)
        check(httpx2.post(url, content=b"{}", headers={"Host": "example.com"}), 403)
        check(httpx2.get(f"{running.url}/v1/models"), 200, "/v1/models", "get")
        for path in ("/health", "/metrics", "/"):
            check(httpx2.get(f"{running.url}{path}"), 200, path, "get")
        error = within(written, "Error")
        for path, method, status in (("/v1/nothing", "GET", 404), (TEXT, "GET", 405), ("/openapi.json", "PUT", 405)):
            found = httpx2.request(method, f"{running.url}{path}")
            assert found.status_code == status and error.is_valid(found.json())
            assert ("allow" in found.headers) == (status == 405)
    gate.close()
    with serving(json_engine) as running, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.post, TEXT, body)
        until(lambda: running.admission.running == 1)
        running.server.end()
        until(lambda: running.admission.is_closing)
        check(running.post(TEXT, body), 503)
        check(httpx2.get(f"{running.url}/health"), 503, "/health", "get")
        gate.open()
        check(answer.result(), 200)
    with serving(json_engine, key=KEY) as running:
        of = Conformance(httpx2.get(f"{running.url}/openapi.json").json())
        check(running.post(TEXT, body), 401, of=of)
        check(running.post(TEXT, body, Authorization=f"Bearer {KEY}"), 200, of=of)
    told = {int(status) for status in written["paths"][TEXT]["post"]["responses"]}
    assert met >= (told | {401}) - {400, 500}

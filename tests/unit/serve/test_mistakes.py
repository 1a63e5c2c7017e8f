"""Every wrong request is refused with one line that names what is wrong; none is a server's error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paradraft.serve.chat import ChatCompletionRequest
from paradraft.serve.completions import CompletionRequest
from paradraft.serve.exchange import ApiError
from paradraft.serve.schemas import NOT_SERVED, read
from tests.support.serving import Serving
from tests.unit.serve.test_limits import error_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "look"}}
WRONG = {"type": "function", "function": {"name": "a b"}}
OTHER = {"type": "function", "function": {"name": "other"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def parts(**message: object) -> dict[str, Any]:
    return {"messages": [message]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": {}}, "prompt"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["a", 5]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [1.5]}, "prompt"),
        (TEXT, {"prompt": [64]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [[[1]]]}, "prompt"),
        (TEXT, {"prompt": "a\ud800"}, "prompt"),
        (TEXT, {"prompt": "a" * 128}, "prompt"),
        (TEXT, {"prompt": "a" * 100, "max_tokens": 29}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 101}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": True}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        (TEXT, {"prompt": "a", "n": 0}, "n"),
        (TEXT, {"prompt": "a", "seed": 2**63}, "seed"),
        (TEXT, {"prompt": "a", "seed": 2**63 - 1, "n": 2}, "seed"),
        (TEXT, {"prompt": "a", "seed": 10**30}, "seed"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "a", "top_p": 1.5}, "top_p"),
        (TEXT, {"prompt": "a", "top_k": -5}, "top_k"),
        (TEXT, {"prompt": "a", "min_p": 2}, "min_p"),
        (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        (TEXT, {"prompt": "a", "presence_penalty": 1e6}, "presence_penalty"),
        (TEXT, {"prompt": "a", "frequency_penalty": []}, "frequency_penalty"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"64": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"٣": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"1": 1e9}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        (TEXT, {"prompt": "a", "stop": ["a", "b", "c", "d", "e"]}, "stop"),
        (TEXT, {"prompt": "a", "stop": ""}, "stop"),
        (TEXT, {"prompt": "a", "stop": [5]}, "stop"),
        (TEXT, {"prompt": "a", "stop": "\ud800"}, "stop"),
        (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (TEXT, {"prompt": "a", "speculation": "on"}, "speculation"),
        (TEXT, {"prompt": "a", "speculation": 5}, "speculation"),
        (TEXT, {"prompt": "a", "speculation": -1}, "speculation"),
        (TEXT, {"prompt": "a", "speculation": True}, "speculation"),
        (TEXT, {"prompt": "a", "paradraft": 1}, "paradraft"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "echo": True}, "echo"),
        (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "a", "messages": USER}, "messages"),
        (TEXT, {"prompt": "a", "nonsense\ud800\n": 1}, "nonsense\\ud800\\n"),
        (CHAT, {"messages": USER, "prompt": "a"}, "prompt"),
        (CHAT, {"messages": USER, "logprobs": 1}, "logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (TEXT, {"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        (
            CHAT,
            {"messages": USER, "tools": [WRONG]},
            "tools[0].function.name",
        ),
        (CHAT, {"messages": USER, "tools": [TOOL]}, "tools"),
        (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": OTHER}, "tool_choice"),
        (CHAT, {"messages": USER, "tools": [TOOL], "response_format": {"type": "text"}}, "response_format"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": USER, "max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        (CHAT, {"messages": USER, "max_completion_tokens": 101}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": USER, "chat_template_kwargs": []}, "chat_template_kwargs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "a"}, "messages"),
        (CHAT, {"messages": ["a"]}, "messages[0]"),
        (CHAT, parts(role="robot", content="a"), "messages[0].role"),
        (CHAT, parts(role="user"), "messages[0].content"),
        (CHAT, parts(role="user", content=[{"type": "image_url", "image_url": "x"}]), "messages"),
        (CHAT, parts(role="user", content="\ud800"), "messages"),
        (CHAT, parts(role="user", content="a", tool_calls=[CALL]), "messages[0].tool_calls"),
        (CHAT, parts(role="assistant", content="a", tool_calls=[{}]), "messages[0].tool_calls[0].id"),
        (CHAT, {"messages": [*USER, {"role": "assistant", "content": "a"}]}, "messages"),
    ],
)
def test_wrong_requests(running: Serving, path: str, body: dict[str, Any], param: str) -> None:
    for streamed in (body, {"stream": True} | body):
        if streamed is not body and "stream_options" in body and "stream" not in body:
            continue
        refused = running.post(path, streamed)
        error = error_of(refused)
        assert (refused.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert running.admission.is_idle and running.admission.waiting == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b'"a"', b"null", b"[" * 5000, b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"9" * 6000],
)
def test_bodies_that_are_no_object(running: Serving, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    refused = httpx2.post(f"{running.url}{TEXT}", content=content, headers=headers)
    assert refused.status_code == 400 and "body" in error_of(refused)["message"]


def test_other_mistakes(running: Serving) -> None:
    other = running.post(TEXT, {"prompt": "a", "model": "gpt\ud800"})
    assert other.status_code == 404 and error_of(other)["code"] == "model_not_found"
    for path, method, status in (("/v1/nothing", "GET", 404), (TEXT, "GET", 405), ("/health", "POST", 405)):
        assert error_of(found := httpx2.request(method, running.url + path)) and found.status_code == status
    text = httpx2.post(f"{running.url}{TEXT}", content=b"{}", headers={"Content-Type": "text/plain"})
    assert text.status_code == 415 and error_of(text)


def test_what_changes_nothing_is_taken(running: Serving) -> None:
    """Guards clients that send defaults, or null for what they do not say."""
    harmless = {name: values[0] for name, values in NOT_SERVED.items() if values}
    body = {"prompt": "a", "max_tokens": 2, "user": "me", "seed": None, "stop": None, "stream_options": None}
    found = running.post(TEXT, body | harmless | {"metadata": {"a": "b"}, "store": True})
    assert found.status_code == 200 and found.headers["X-Paradraft-Ignored"] == "metadata, store, user"
    stream = running.post(TEXT, body | {"stream": True})
    assert stream.headers["X-Paradraft-Ignored"] == "user"
    assert "X-Paradraft-Ignored" not in running.post(TEXT, {"prompt": "a", "max_tokens": 2} | harmless).headers
    history = [*USER, {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None}, *USER]
    assert running.post(CHAT, {"messages": history, "max_tokens": 2} | harmless).status_code == 200


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_a_router_adds_is_accepted(running: Serving, path: str) -> None:
    """Guards vLLM's router, which writes a request anew with all parameters that it knows (0.1.17)."""
    added = {
        "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "logprobs": False,
        "return_hidden_states": False, "continue_final_message": False, "separate_reasoning": True,
        "stream_reasoning": True, "include_reasoning": True, "stream": False,
    }  # fmt: skip
    asked = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    added.pop("logprobs" if path == TEXT else "echo")
    found = running.post(path, asked | added | {"max_tokens": 2})
    assert found.status_code == 200, found.text
    assert found.headers["X-Paradraft-Ignored"] == "include_reasoning, separate_reasoning, stream_reasoning"
    refused = running.post(path, asked | {"no_stop_trim": True})
    assert refused.status_code == 400 and "no_stop_trim is not served" in refused.text


def test_whole_numbers_with_a_point(running: Serving) -> None:
    """Guards numbers that some languages write so: in JSON 5.0 is 5, and an id of a token too."""
    body = b'{"prompt": [5.0, 6e0], "max_tokens": 4.0, "n": 2.0, "seed": 3.0, "logit_bias": {"0": -1e2}}'
    found = running.post_bytes(TEXT, body).json()
    plain = {"prompt": [5, 6], "max_tokens": 4, "n": 2, "seed": 3, "logit_bias": {"0": -100}}
    assert found["choices"] == running.post(TEXT, plain).json()["choices"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_values(data: st.DataObject) -> None:
    """Guards the reading of requests: whatever stands there, it is read or refused."""
    schema = data.draw(st.sampled_from([CompletionRequest, ChatCompletionRequest]))
    keys = data.draw(st.lists(st.sampled_from(sorted({*schema.model_fields, *NOT_SERVED})), max_size=4))
    body = {key: data.draw(anything) for key in keys}
    with suppress(ApiError):
        read(json.dumps(body).encode(), schema)

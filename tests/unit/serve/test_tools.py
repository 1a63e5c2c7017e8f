"""Calls of functions: what the template reads, what the grammar forces, and what clients get."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI

from paradraft.engine.engine import Engine
from paradraft.serve.tools import BEGIN, END, CallReader
from tests.support.serving import MODEL, Serving, serving

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments.n }}"
    "</tool_call>{% endfor %}{% endfor %}a"
)
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
WORD = {"type": "object", "properties": {"w": {"enum": ["x", "y"]}}, "required": ["w"], "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "count", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "say", "description": "Says it.", "parameters": WORD}},
]
SCHEMAS = {"count": NUMBER, "say": WORD}
MESSAGES: list[Any] = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def client(json_engine: Engine) -> Iterator[OpenAI]:
    before, json_engine.target.tokenizer.chat_template = json_engine.target.tokenizer.chat_template, TEMPLATE
    try:
        with serving(json_engine, max_batch=3, max_new_tokens=200) as running:
            yield running.client()
    finally:
        json_engine.target.tokenizer.chat_template = before


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", "say"])
def test_a_call_that_is_demanded(client: OpenAI, choice: str, seed: int) -> None:
    """Guards clients that parse the arguments: the answer is one call of a function that was offered, or of the one
    that was named, its arguments fit the schema, and a stream has the same call."""
    wanted: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": wanted, "max_tokens": 150}
    asked |= {"temperature": 0.8, "seed": seed}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    if whole.finish_reason == "length":  # an integer may have any number of digits
        assert whole.message.content
        return
    (call,) = whole.message.tool_calls or []
    assert whole.finish_reason == "tool_calls" == chunks[-1].finish_reason and whole.message.content is None
    assert call.function.name in ([choice] if choice != "required" else SCHEMAS)
    jsonschema_rs.validator_for(SCHEMAS[call.function.name]).validate(json.loads(call.function.arguments))
    (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert streamed.index == 0 and not any(chunk.delta.content for chunk in chunks)
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert streamed.id != call.id


def test_demanded_calls_are_seldom_cut(client: OpenAI) -> None:
    """Control of the test above, which lets cut answers pass."""
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS[1:], "tool_choice": "required"}
    found = [client.chat.completions.create(**asked, max_tokens=190, seed=seed).choices[0] for seed in range(4)]
    assert [each.finish_reason for each in found].count("tool_calls") >= 3


def test_what_the_template_reads(client: OpenAI, json_engine: Engine) -> None:
    """Guards a conversation with calls and their results: functions come first, arguments are objects, and nothing is
    offered if nothing may be called."""
    calls = [{"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"n": 12}'}}]
    history: list[Any] = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "12 it is"},
    ]  # fmt: skip
    text = "ugoa<tool_call>count12</tool_call>t12 it isa"
    for more, expected in (({"tools": TOOLS}, "countsay" + text), ({"tools": TOOLS, "tool_choice": "none"}, text)):
        asked: Any = {"model": MODEL, "messages": history, "max_tokens": 1, "extra_body": {"return_token_ids": True}}
        found: Any = client.chat.completions.create(**asked, **more)
        assert json_engine.target.tokenizer.decode(found.prompt_token_ids) == expected


CALLS = [("count", {"n": 3}), ("say", {"w": "ü"}), ("say", {"w": "</tool"})]


TAG = {"name": "say", "arguments": {"w": END}}
NO_CALLS = [f'{BEGIN}{{"name": "say", "arguments": {wrong}}}{END}' for wrong in ('"x"', "[NaN]", "[1e999]")]


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("plain text", "plain text", []),
        ("a < b <tool> <tool_", "a < b <tool> <tool_", []),
        ('Sure.\n<tool_call>\n{"name": "count", "arguments": {"n": 3}}\n</tool_call>', "Sure.", CALLS[:1]),
        (
            '<tool_call>{"name": "count", "arguments": {"n": 3}}</tool_call>\n\n'
            '<tool_call>{"arguments": {"w": "ü"}, "name": "say"}</tool_call>\nDone.',
            "Done.",
            CALLS[:2],
        ),
        ('<tool_call>{"name": "count", "arguments": {"n": 3}}', "", CALLS[:1]),
        ('<tool_call>{"name": "count", "argum', '<tool_call>{"name": "count", "argum', []),
        (f"{BEGIN}{json.dumps(TAG)}{END}", "", [("say", TAG["arguments"])]),
        ('<tool_call>{"name": "say", "arguments": "{\\"w\\": 1}"}</tool_call>', "", [("say", {"w": 1})]),
        *((text, text, []) for text in NO_CALLS),
        ("x <tool_call>[1]</tool_call> y", "x <tool_call>[1]</tool_call> y", []),
        ('```json\n{"name": "count", "arguments": {"n": 3}}\n```\n', "", CALLS[:1]),
        ('{"name": "say", "arguments": {"w": "</tool"}}', "", CALLS[2:]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('{"name": "say", "arguments": {}, "x": 1}', '{"name": "say", "arguments": {}, "x": 1}', []),
        ("```json\n{}\n``` is JSON", "```json\n{}\n``` is JSON", []),
        ("```python\nx\n```", "```python\nx\n```", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ],
)
def test_texts_and_calls(answer: str, content: str, calls: list[tuple[str, Any]]) -> None:
    """Guards answers in pieces of any size: the text and the calls are those of the whole, and no part of a call is
    shown as text; what is no call is."""
    for seed in range(60):
        chooser, reader = random.Random(seed), CallReader(SCHEMAS)
        texts, found, rest = list[str](), list[Any](), answer
        while rest:
            size = len(rest) if seed == 0 else chooser.randint(1, 5)
            piece, rest = rest[:size], rest[size:]
            text, new = reader.read(piece, is_last=not rest)
            texts.append(text)
            found += [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in new]
        assert ("".join(texts), found) == (content, calls)


def test_one_call_only(json_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards clients that can make but one call: the answer ends with its end."""
    seen: list[object] = []
    stream = json_engine.astream
    monkeypatch.setattr(json_engine.target.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(json_engine, "astream", lambda *of, **more: (seen.append(more["stop"]), stream(*of, **more))[1])
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2, "stop": "zz"}
    with serving(json_engine) as running:
        for more in ({}, {"parallel_tool_calls": False}):
            assert running.post("/v1/chat/completions", body | more).status_code == 200
    assert seen == ["zz", ["zz", "</tool_call>"]]


def test_a_template_without_tools(running: Serving) -> None:
    """Guards against functions that a model never sees."""
    found = running.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS})
    assert found.status_code == 400 and found.json()["error"]["param"] == "tools"


def test_a_long_call_takes_no_time(client: OpenAI) -> None:
    """Guards all other streams, which wait while a piece is read: neither a long call nor a long run of spaces is read
    again and again."""
    reader, code = CallReader(SCHEMAS), "    return 1\\n" * 2000
    pieces = ["<tool_call>", '{"name": "say", "arguments": {"w": "', *re.findall(".{1,4}", code), '"}}', "</tool_call>"]
    began_s = time.process_time()
    calls = [call for piece in pieces for call in reader.read(piece, is_last=False)[1]]
    for _ in range(1500):
        reader.read(" " * 20, is_last=False)
    assert len(calls) == 1 and time.process_time() - began_s < 2.0


NESTED: dict[str, Any] = {
    "properties": {"where": {"$ref": "#/$defs/Place"}}, "required": ["where"], "additionalProperties": False,
    "$defs": {"Place": {"enum": ["here", "there"]}},
}  # fmt: skip


def test_schemas_with_references(client: OpenAI) -> None:
    """Guards the schemas of nested types, whose references are to their own root."""
    tools: Any = [{"type": "function", "function": {"name": "go", "parameters": NESTED}}]
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 150}
    found = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert found and json.loads(found[0].function.arguments)["where"] in ("here", "there")


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "a", "description": "\ud800"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"\ud800": 1}}}]},
        {"tools": TOOLS, "tool_choice": "required", "logit_bias": {"5": -float("1e999")}},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
    ],
)
def test_wrong_tools(json_engine: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    """Guards the log against errors of clients."""
    monkeypatch.setattr(
        json_engine.target.tokenizer, "chat_template", "{{ (tools or []) | tojson }}<tool_call>" + TEMPLATE
    )
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2, **more}).replace("-Infinity", "-1e999")
    with serving(json_engine) as running:
        found = running.post_bytes("/v1/chat/completions", body.encode())
    assert found.status_code == 400, found.text


def test_what_other_servers_wrote(client: OpenAI) -> None:
    """Guards histories that clients built of other servers' answers."""
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "count", "arguments": "{}"}}
    history: list[Any] = [
        *MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call], "annotations": [], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": []},
        *MESSAGES,
    ]  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "count", "parameters": None, "strict": None}}]
    assert client.chat.completions.create(model=MODEL, messages=history, tools=tools, max_tokens=1).choices

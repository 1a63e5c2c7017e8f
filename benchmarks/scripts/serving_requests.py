"""Requests of the soak of a server: good ones, with the answers of an engine that drafts nothing, and wrong ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paradraft
from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from paradraft.serve.choices import REASONS
from paradraft.serve.grammar import Grammar, Grammars
from paradraft.serve.schemas import ResponseFormat

ROOT = Path(__file__).parents[2]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
PROMPTS: list[Any] = [
    "def read_lines(path):", "import os", "class Stack:", "for name in sorted(", "x = ", "return [", "# The é",
    "if __name__ ==", "try:\n    ", "    def __init__(self", [5, 6, 7], [4000], ["import", "from"],
    "def add(a, b):\n    return a + b\n\n" * 20,
]  # fmt: skip
CHATS = [json.loads(line)["messages"] for line in (ROOT / "benchmarks/prompts/chat.jsonl").read_text().splitlines()]
LONG = ROOT / "README.md"
"""Long prompts are parts of it: three quarters of the context with their answer."""
LONGEST = 64
"""Tokens of an answer."""
PLACE = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    {"temperature": 0.8, "logit_bias": {"5": 3.0, "7": -100}},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.1, "logprobs": 0},
    {"stop": ["\n", "):"]},
    {"response_format": {"type": "json_object"}, "temperature": 0.7},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}},
]
LOGPROB_TOLERANCE = 1e-3
"""Passes of other shapes may round differently."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What comes back of a good request.

    Args:
        choices: the text of each, and why it has ended.
        logprobs: of the tokens of all choices, if asked for.
        tokens: of all choices.
    """

    choices: list[tuple[str, str]]
    logprobs: list[float]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Good:
    """A request that is answered.

    Args:
        body: without what changes no text.
        path: of the address.
        wanted: its answer offline.
    """

    body: dict[str, Any]
    path: str
    wanted: Answer


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, and what the response should be.

    Args:
        content: its body.
        status: of the response.
        param: which parameter its error names.
        method: of HTTP.
        path: of the address.
        headers: of the request.
    """

    content: bytes
    status: int = 400
    param: str | None = None
    method: str = "POST"
    path: str = TEXT
    headers: dict[str, str] = field(default_factory=lambda: JSON)


def refused(param: str, path: str = TEXT, **more: object) -> Request:
    """A request of which one parameter, or a part of it, is wrong."""
    asked: dict[str, object] = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    return Request(content=json.dumps(asked | more).encode(), param=param, path=path)


def wrong_requests(engine: Engine) -> list[Request]:
    """Requests that a server of an engine's target refuses."""
    capacity, reads_chats = engine.target.capacity, engine.target.tokenizer.chat_template is not None
    return [
        *(Request(content=content) for content in (b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b"[" * 5000)),
        Request(content=b"{}", status=415, headers={"Content-Type": "text/plain"}),
        Request(content=b"", status=404, method="GET", path="/v1/nothing"),
        Request(content=b"", status=405, method="GET"),
        Request(content=b"", status=405, path="/health"),
        Request(content=b'{"prompt": "a", "model": "other"}', status=404, param="model"),
        refused("prompt", prompt=""),
        refused("prompt", prompt=[10**6]),
        refused("prompt", prompt={"a": 1}),
        refused("prompt", prompt=[5] * (capacity + 1)),
        refused("max_tokens", prompt=[5] * (capacity // 2), max_tokens=capacity),
        refused("max_tokens", max_tokens="5"),
        refused("max_tokens", max_tokens=10**6),
        refused("n", n=0),
        refused("seed", seed=2**63),
        refused("temperature", temperature="hot"),
        refused("top_p", top_p=1.5),
        refused("logit_bias", logit_bias={"x": 1}),
        refused("logprobs", logprobs=21),
        refused("stop", stop=["a", "b", "c", "d", "e"]),
        refused("stream", stream="yes"),
        refused("stream_options", stream_options={"include_usage": True}),
        refused("speculation", speculation=5),
        refused("best_of", best_of=2),
        refused("nonsense", nonsense=1),
        refused("response_format", response_format={"type": "json_schema"}),
        refused("response_format", response_format=_schema_in_json_object()),
        refused("response_format", response_format=_unknown_type()),
        refused("messages", CHAT, messages=[] if reads_chats else [{"role": "user", "content": "a"}]),
        refused("tools[0].function" if reads_chats else "tools", CHAT, tools=[{"type": "function"}]),
    ]


def _schema_in_json_object() -> dict[str, Any]:
    return {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}


def _unknown_type() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}


def good_requests(engine: Engine, count: int, seed: int) -> list[Good]:
    """Distinct requests with their answers: all settings come in turn, the rest is chosen.

    Args:
        engine: drafts nothing.
    """
    chooser, grammars = random.Random(seed), Grammars(engine.target.facts)
    reads_chats = engine.target.tokenizer.chat_template is not None
    long, length = engine.prompt_tokens(LONG.read_text(encoding="utf-8")), engine.target.capacity * 3 // 4 - LONGEST
    long *= 2 + length // len(long)
    begins = [chooser.randrange(len(long) - length) for _ in range(3)]
    prompts = [*PROMPTS, *(long[begin : begin + length] for begin in begins)]
    requests = list[Good]()
    for number in range(count):
        body = _settings(number, chooser)
        if reads_chats and chooser.random() < 0.5:
            path, body = CHAT, _as_chat(body | {"messages": _conversation(chooser)})
        else:
            path, body = TEXT, body | {"prompt": chooser.choice(prompts)}
        requests.append(Good(body=body, path=path, wanted=offline(engine, body, grammars)))
    return requests


def _settings(number: int, chooser: random.Random) -> dict[str, Any]:
    settings = {
        "max_tokens": chooser.randint(4, LONGEST),
        "n": chooser.choice((1, 1, 2, 3)),
        "seed": chooser.randrange(2**40),
    } | SETTINGS[number % len(SETTINGS)]
    if "stop" not in settings and chooser.random() < 0.2:
        settings["stop"] = chooser.choice(("self", ["(", "import"], "\n\n"))
    return settings


def _conversation(chooser: random.Random) -> list[dict[str, str]]:
    """A question, alone or after another and its answer."""
    before, last = chooser.sample(CHATS, 2)
    answered = [*before, {"role": "assistant", "content": "I do not know."}]
    return last if chooser.random() < 0.7 else [*answered, *last]


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same settings as the chat endpoint names them."""
    return body | {"logprobs": True, "top_logprobs": body["logprobs"]} if "logprobs" in body else body


def offline(engine: Engine, asked: dict[str, Any], grammars: Grammars) -> Answer:
    """What an engine answers to a request."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    settings = {"temperature": 1.0} | {name: asked[name] for name in names if name in asked}
    settings["logit_bias"] = {int(token): bias for token, bias in asked.get("logit_bias", {}).items()}
    matcher = None
    if "response_format" in asked:
        schema = ResponseFormat.model_validate(asked["response_format"]).schema_of_answers
        assert schema is not None
        matcher = grammars.matcher(schema)
    choices, logprobs, tokens = list[tuple[str, str]](), list[float](), 0
    for ids in _prompts(engine, asked):
        for number in range(asked["n"]):
            if matcher is not None:
                grammar = Grammar(matcher, prompt=len(ids), eos_ids=engine.target.eos_ids)
                settings["processors"] = (grammar,)
            sampling = Sampling(**settings, seed=asked["seed"] + number)
            stop, most = asked.get("stop", ()), asked["max_tokens"]
            result = engine.generate(ids, max_new_tokens=most, sampling=sampling, stop=stop)
            choices.append((result.text, REASONS[result.finish_reason]))
            tokens += len(result.tokens)
            if "logprobs" in asked:
                stream = engine.astream(ids, max_new_tokens=most, sampling=sampling, stop=stop, logprobs=0)
                logprobs += asyncio.run(_logprobs_of(stream))
    return Answer(choices=choices, logprobs=logprobs, tokens=tokens)


def _prompts(engine: Engine, asked: dict[str, Any]) -> list[list[int]]:
    if "messages" in asked:
        return [engine.chat_tokens(asked["messages"])]
    prompt = asked["prompt"]
    several = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    return [engine.prompt_tokens(each) for each in several]


async def _logprobs_of(stream: AsyncIterator[paradraft.Chunk]) -> list[float]:
    return [each.logprob async for chunk in stream for each in chunk.logprobs]


def answer_of(reply: bytes, streamed: bool) -> Answer:
    """The answer in a response.

    Raises:
        ValueError: it is none.
    """
    if streamed:
        *events, last = [line.removeprefix(b"data: ") for line in reply.split(b"\n\n") if line]
        if last != b"[DONE]":
            raise ValueError(f"the last event is {last!r}")
        pieces = [json.loads(event) for event in events]
    else:
        pieces = [json.loads(reply)]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    count = 1 + max(choice["index"] for choice in choices)
    texts, reasons, logprobs = [""] * count, [""] * count, [list[float]() for _ in range(count)]
    for choice in choices:
        index = choice["index"]
        texts[index] += _text_of(choice)
        reasons[index] = choice["finish_reason"] or reasons[index]
        logprobs[index] += _token_logprobs(choice["logprobs"])
    return Answer(
        choices=list(zip(texts, reasons, strict=True)),
        logprobs=[each for of_choice in logprobs for each in of_choice],
        tokens=pieces[-1]["usage"]["completion_tokens"],
    )


def _text_of(choice: dict[str, Any]) -> str:
    """Of a completion, or of a chat's message or a part of it."""
    if "text" in choice:
        return str(choice["text"])
    message = choice["delta"] if "delta" in choice else choice["message"]
    return message.get("content") or ""


def _token_logprobs(logprobs: dict[str, Any] | None) -> list[float]:
    if logprobs is None:
        return []
    if "token_logprobs" in logprobs:
        return list(logprobs["token_logprobs"])
    return [each["logprob"] for each in logprobs["content"]]


def difference(wanted: Answer, found: Answer) -> str | None:
    """What is different in two answers; None if nothing is."""
    for name in ("choices", "tokens"):
        if getattr(wanted, name) != getattr(found, name):
            return f"{name}: {getattr(found, name)!r} in place of {getattr(wanted, name)!r}"
    if len(wanted.logprobs) != len(found.logprobs):
        return f"{len(found.logprobs)} log probabilities in place of {len(wanted.logprobs)}"
    for place, (ours, theirs) in enumerate(zip(wanted.logprobs, found.logprobs, strict=True)):
        if not abs(ours - theirs) <= LOGPROB_TOLERANCE:
            return f"log probability {place}: {theirs} in place of {ours}"
    return None

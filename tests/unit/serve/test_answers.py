"""Answers over HTTP are those of the engine, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from paradraft import load
from paradraft.engine.answers import Result
from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from tests.support.serving import MODEL, Serving, serving

PROMPTS = ["hello", "a", "abcabc", "The", "xyz", "B5C6"]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"seed": 11, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}},
    {"seed": 12, "temperature": 0.8, "logit_bias": {"5": 3.0, "7": -100}},
]
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def offline(
    engine: Engine, prompt: object, settings: dict[str, Any], tokens: int = 24, number: int = 0, stop: object = ()
) -> Result:
    plain = {key: value for key, value in settings.items() if key not in ("extra_body", "logit_bias")}
    plain |= settings.get("extra_body", {})
    biases = {int(token): bias for token, bias in settings.get("logit_bias", {}).items()}
    seed = plain.pop("seed", 0) + number
    sampling = Sampling(**{"temperature": 1.0} | plain, logit_bias=biases, seed=seed)
    return engine.generate(prompt, max_new_tokens=tokens, sampling=sampling, stop=stop)


def test_what_a_request_does_not_say_is_as_the_model_asks(engine: Engine) -> None:
    """Guards the defaults of generation_config.json in both kinds of requests, parameter by parameter; null is what is
    not said."""
    defaults = {"temperature": 0.8, "top_k": 9, "repetition_penalty": 1.3}
    with serving(engine, defaults=defaults) as found:
        for more in ({}, {"temperature": 0}, {"top_k": 0, "temperature": None}, {"top_p": 0.5}):
            given = {name: value for name, value in more.items() if value is not None}
            wanted = offline(engine, "hello", {"seed": 4, **defaults, **given}).text
            body = {"prompt": "hello", "max_tokens": 24, "seed": 4, **more}
            assert found.post("/v1/completions", body).json()["choices"][0]["text"] == wanted
            message = {"role": "user", "content": "hello"}
            ids = engine.chat_tokens([message])
            wanted = offline(engine, ids, {"seed": 4, **defaults, **given}).text
            body = {"messages": [message], "max_tokens": 24, "seed": 4, **more}
            assert found.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == wanted


@pytest.fixture(scope="module")
def client(running: Serving) -> OpenAI:
    return running.client()


def test_many_at_once(engine: Engine, client: OpenAI) -> None:
    """Guards the text of each of many requests that join and leave one batch of three rows, streamed and not."""

    def answer(number: int) -> tuple[str, str | None]:
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[number % 6], "max_tokens": 24}
        asked |= SETTINGS[number % len(SETTINGS)]
        if number % 2:
            (choice,) = client.completions.create(**asked).choices
            return choice.text, choice.finish_reason
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(answer, range(30)))
    wanted = [offline(engine, PROMPTS[number % 6], SETTINGS[number % len(SETTINGS)]) for number in range(30)]
    assert found == [(result.text, REASONS[result.finish_reason]) for result in wanted]
    assert len({text for text, _ in found}) > 10, "the settings change nothing, so the equality shows little"


@pytest.mark.parametrize("stream", [False, True])
def test_choices(engine: Engine, client: OpenAI, stream: bool) -> None:
    """Guards n and lists of prompts: seeds go up from that of the request, choices are numbered prompt by prompt."""
    settings: dict[str, Any] = {"temperature": 1.1, "seed": 40}
    asked: Any = {"model": MODEL, "prompt": [[5, 6, 7], [9]], "n": 3, "max_tokens": 20, "stream": stream, **settings}
    if stream:
        texts = [""] * 6
        *chunks, last = client.completions.create(**asked, stream_options={"include_usage": True})
        for chunk in chunks:
            texts[chunk.choices[0].index] += chunk.choices[0].text
            assert chunk.usage is None
        assert last.choices == []
    else:
        last = client.completions.create(**asked)
        assert [choice.index for choice in last.choices] == [0, 1, 2, 3, 4, 5]
        texts = [choice.text for choice in last.choices]
    wanted = [offline(engine, ids, settings, 20, number) for ids in ([5, 6, 7], [9]) for number in range(3)]
    assert texts == [result.text for result in wanted] and len({*texts}) == 6
    written = sum(len(result.tokens) for result in wanted)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (
        4,
        written,
        4 + written,
    )


def test_seeds_of_its_own(client: OpenAI) -> None:
    """Guards against equal answers where no seed is given."""
    asked: Any = {"model": MODEL, "prompt": "hello", "n": 2, "max_tokens": 20, "temperature": 1.3}
    texts = {choice.text for _ in range(2) for choice in client.completions.create(**asked).choices}
    assert len(texts) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(engine: Engine, client: OpenAI, stream: bool) -> None:
    whole = offline(engine, "hello", {"temperature": 0}).text
    stop = [whole[5:7], "nothing"]
    asked: Any = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "temperature": 0}
    for given in (stop, stop[0]):
        if stream:
            chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stop=given, stream=True)]
            text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
        else:
            (choice,) = client.completions.create(**asked, stop=given).choices
            text, reason = choice.text, choice.finish_reason
        assert (text, reason) == (whole[: whole.index(stop[0])], "stop")


def test_chat(engine: Engine, client: OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    asked: Any = {"model": MODEL, "messages": messages, "temperature": 0.7, "seed": 3, "max_completion_tokens": 20}
    for variables in ({}, {"loud": True}):
        ids = engine.chat_tokens(messages, variables)
        wanted = offline(engine, ids, {"temperature": 0.7, "seed": 3}, 20)
        extra = {"chat_template_kwargs": variables}
        whole = client.chat.completions.create(**asked, extra_body=extra)
        assert (whole.object, whole.choices[0].message.role) == ("chat.completion", "assistant")
        assert whole.choices[0].message.content == wanted.text
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, extra_body=extra, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == wanted.text
        assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert len(chunks) == len(wanted.accepted), "one event for each round"


def test_an_answer_as_long_as_there_is_room_for(engine: Engine, client: OpenAI) -> None:
    """Guards chats without a limit of their own: the server's, or what the model has room for."""
    for asked_for, most in ((10, 100), (60, engine.target.capacity - 62)):
        messages: Any = [{"role": "user", "content": "b" * asked_for}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, seed=1)
        assert answer.usage is not None and answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == most


def test_a_text_as_long_as_is_usual(engine: Engine, client: OpenAI) -> None:
    """Guards requests that say nothing of the length: OpenAI's 16 tokens, or fewer where there is room for fewer or the
    server gives fewer, and not a mistake of a parameter that is not there."""
    with serving(engine, max_new_tokens=8) as short:
        for asker, prompt, most in (
            (client, 20, 16),
            (client, 120, 8),
            (short.client(), 20, 8),
            (short.client(), 125, 3),
        ):
            answer = asker.completions.create(model=MODEL, prompt="b" * prompt, seed=1, logit_bias={"0": -100})
            assert answer.usage is not None and answer.usage.completion_tokens == most


@pytest.mark.parametrize("speculation", ["off", 0, 2, 4])
def test_speculation(engine: Engine, client: OpenAI, speculation: object) -> None:
    """Guards the draft length of one request: its text is the same, and it drafts no more than it should."""
    extra = {"speculation": speculation, "paradraft": True}
    asked: Any = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "temperature": 0, "stream": True}
    chunks = list(client.completions.create(**asked, extra_body=extra))
    rounds = [chunk.model_extra["paradraft"] for chunk in chunks]
    wanted = offline(engine, "hello", {"temperature": 0})
    assert "".join(told["drafted_text"] + told["own_text"] for told in rounds) == wanted.text
    most = 0 if speculation == "off" else speculation
    assert max(told["drafted"] for told in rounds) == most
    if speculation == 4:
        assert tuple(told["accepted"] for told in rounds) == wanted.accepted
        assert sum(wanted.accepted), "nothing was accepted, so this shows little"


def test_no_extension_without_asking(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}
    assert all("paradraft" not in (chunk.model_extra or {}) for chunk in client.completions.create(**asked))


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_log_probabilities(engine: Engine, client: OpenAI) -> None:
    """Guards how they are written, whole and in pieces; tests/unit/test_async.py compares them with a pass."""

    async def of_engine() -> list[Any]:
        stream = engine.astream("hello", max_new_tokens=20, logprobs=2)
        return [each async for chunk in stream for each in chunk.logprobs]

    wanted = asyncio.run(of_engine())
    texts = [engine.target.tokenizer.decode([each.token]) for each in wanted]
    asked: Any = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None and whole.tokens == texts
    assert whole.token_logprobs == pytest.approx([each.logprob for each in wanted])
    assert whole.text_offset == [sum(map(len, texts[:place])) for place in range(len(texts))]
    assert whole.top_logprobs is not None
    assert [list(each.values()) for each in whole.top_logprobs] == [
        pytest.approx(sorted((logprob for _, logprob in each.likeliest))) for each in wanted
    ]
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for piece in pieces for each in getattr(piece, name)] == getattr(whole, name)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 8}
    (choice,) = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob) == (first.top_logprobs[0].token, first.top_logprobs[0].logprob)
    assert first.bytes == list(first.token.encode()) and len(first.top_logprobs) == 2
    (plain,) = client.chat.completions.create(**asked).choices
    assert plain.logprobs is None


def test_token_ids(engine: Engine, running: Serving, client: OpenAI) -> None:
    """Guards programs that need ids, where texts do not tell them, as vLLM gives them: streamed or not, chats too."""
    (wanted,) = engine.generate(["hello"], max_new_tokens=20)
    prompt = engine.prompt_tokens("hello")
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "temperature": 0, "extra_body": more}
    choice = client.completions.create(**asked, prompt="hello", logprobs=2).choices[0].model_dump()
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (wanted.tokens, prompt)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in wanted.tokens]
    assert all(
        name in best
        for name, best in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True)
    )
    chunks = [each.choices[0].model_dump() for each in client.completions.create(**asked, prompt="hello", stream=True)]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == wanted.tokens
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (len(chunks) - 1)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        **more,
    }
    told = running.post("/v1/chat/completions", body).json()
    assert told["prompt_token_ids"] == engine.chat_tokens(body["messages"])
    assert [entry["token"] for entry in told["choices"][0]["logprobs"]["content"]] == [
        f"token_id:{token}" for token in told["choices"][0]["token_ids"]
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_timings(running: Serving, n: int) -> None:
    """Guards the speed and the acceptance that clients show: once for an answer, over all of its choices."""
    asked = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "n": n, "logit_bias": {"0": -100}}
    whole = running.post("/v1/completions", asked).json()
    assert whole["timings"].keys() == {
        "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second", "draft_n", "draft_n_accepted",
    }  # fmt: skip
    reply = running.post("/v1/completions", asked | {"stream": True, "paradraft": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in reply.split("\n\n") if line.startswith("data: {")]
    (timings,) = [each["timings"] for each in events if "timings" in each]
    assert "timings" in events[-1]
    for found in (whole["timings"], timings):
        assert (found["prompt_n"], found["predicted_n"]) == (whole["usage"]["prompt_tokens"], 12 * n)
        assert found["prompt_ms"] > 0.0 and found["predicted_ms"] > 0.0
        assert found["draft_n"] == sum(each["paradraft"]["drafted"] for each in events)
        assert found["draft_n_accepted"] == sum(each["paradraft"]["accepted"] for each in events) > 0
        assert 0.0 < found["predicted_per_second"] < 12 * n / found["predicted_ms"] * 1e3


def test_one_round_has_no_rate(running: Serving) -> None:
    """Guards a division by nothing: the tokens of the first round come with the prompt's time."""
    found = running.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}).json()["timings"]
    assert found["predicted_per_second"] is None and found["predicted_n"] == 1


def test_developers_are_the_system(engine: Engine, running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards OpenAI's newer name of the role, also where a template knows it itself."""

    def answer(role: str) -> str:
        messages = [{"role": role, "content": "be"}, {"role": "user", "content": "hello"}]
        asked = {"messages": messages, "max_tokens": 12, "temperature": 0}
        text = running.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
        return f"{text} after {running.post('/tokenize', {'messages': messages}).json()['tokens']}"

    assert answer("developer") == answer("system")
    template = engine.target.tokenizer.chat_template
    knows = "{% for message in messages %}{% if message.role == 'developer' %}dev{% endif %}{% endfor %}" + template
    monkeypatch.setattr(engine.target.tokenizer, "chat_template", knows)
    assert answer("developer") != answer("system")


def test_tokens_of_a_prompt(engine: Engine, running: Serving) -> None:
    """Guards clients that count before they ask: the tokens are those that completions read."""
    for body, tokens in (
        ({"prompt": "hello"}, engine.prompt_tokens("hello")),
        ({"prompt": [5, 6]}, [5, 6]),
        ({"prompt": "messages"}, engine.prompt_tokens("messages")),
        ({"messages": [{"role": "user", "content": "hello"}]}, None),
    ):
        found = running.post("/tokenize", body).json()
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        used = running.post(path, body | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
        assert found["count"] == len(found["tokens"]) == used and found["max_model_len"] == engine.target.capacity
        assert tokens is None or found["tokens"] == tokens
    assert running.post("/tokenize", {"prompt": "a", "user": "me"}).headers["X-Paradraft-Ignored"] == "user"
    for body, status in (
        ({"prompt": ["a", "b"]}, 400), ({"prompt": [-1]}, 400), ({"prompt": "a", "speculation": 99}, 400),
        ({"prompt": "a", "max_tokens": 101}, 400), ({}, 400),
        ({"prompt": "a", "model": "other"}, 404), ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 400),
    ):  # fmt: skip
        assert running.post("/tokenize", body).status_code == status


@pytest.mark.parametrize(("rule", "is_lossless"), [("match", True), ("block", True), ("typical", False)])
@pytest.mark.filterwarnings("ignore:verify=:UserWarning")
def test_a_rule_that_is_not_lossless_is_named(rule: str, is_lossless: bool) -> None:
    """Guards clients, who do not see what the server says at its start."""
    with serving(load("pocket", drafter="ngram", verify=rule, lengths="fixed")) as running:
        (model,) = httpx2.get(f"{running.url}/v1/models").json()["data"]
        assert model["lossless"] is is_lossless


def test_names_of_the_model(engine: Engine) -> None:
    """Guards clients that name a file by its path, or ask for one model, and the version for bug reports."""
    with serving(engine, key="secret", names=("tiny", "models/tiny.gguf")) as running:
        headers = {"Authorization": "Bearer secret"}
        for name, status in (("tiny", 200), ("models/tiny.gguf", 200), ("gpt-4", 404)):
            found = httpx2.get(f"{running.url}/v1/models/{name}", headers=headers)
            assert found.status_code == status and (status == 404 or found.json()["id"] == "tiny")
            asked = running.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": name}, **headers)
            assert asked.status_code == status and (status == 404 or asked.json()["model"] == "tiny")
        assert running.post("/tokenize", {"prompt": "a"}).status_code == 401
        assert httpx2.get(f"{running.url}/v1/models/tiny").status_code == 401
        assert httpx2.get(f"{running.url}/version").json() == {"version": version("paradraft")}

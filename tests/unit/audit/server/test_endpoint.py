"""How answers of servers are read: whatever they leave out or get wrong is a finding or one line, never a traceback."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from paradraft.audit.server.counters import Counters, counters_of, fault_of_counters
from paradraft.audit.server.endpoint import AuditedServer, Served, ServerPrompt
from paradraft.text.vocabulary import used_rows
from tests.conftest import tiny_tokenizer
from tests.support.endpoint_server import MODEL, Reply, Script, Server
from tests.support.small_tokenizers import KINDS

END, OTHER_END = 0, 5
ASK = ServerPrompt(number=3, prompt="abc", max_new_tokens=8)
Events = list[dict[str, Any]]


def event(
    names: list[str], *, reason: str | None = None, ids: list[int] | None = None, best: Any = None, **others: Any
) -> dict[str, Any]:
    """A chunk of `/completions`."""
    told = {"tokens": names, "token_logprobs": [-0.5] * len(names), "top_logprobs": best} if names else None
    choice = {"index": 0, "text": "".join(names), "logprobs": told, "finish_reason": reason}
    return {"choices": [choice | ({} if ids is None else {"token_ids": ids}) | others]}


def stream(events: Events) -> bytes:
    return "".join(f"data: {json.dumps(each)}\n\n" for each in events).encode() + b"data: [DONE]\n\n"


def always(reply: Reply) -> Script:
    return lambda asked, number: reply


def reader(url: str, tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any) -> AuditedServer:
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    settings = {"model": MODEL, "end_ids": frozenset({END, OTHER_END}), "rows": used_rows(tokenizer)} | settings
    return AuditedServer(url=url, tokenizer=tokenizer, **settings)


def answered(events: Events | bytes, question: ServerPrompt = ASK, **settings: Any) -> Served:
    """What is read of a stream."""
    content = events if isinstance(events, bytes) else stream(events)
    with Server(always(Reply(body=content))) as server:
        (served,) = reader(server.url, **settings).answers([question], lambda _: None)
    return served


def assert_refused(events: Events | bytes, words: str, **settings: Any) -> None:
    """In one line."""
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        answered(events, **settings)
    assert "\n" not in str(told.value)


def test_tokens_are_read_with_the_passes_that_they_came_in() -> None:
    """Guards rounds: each chunk is one pass."""
    served = answered(
        [
            event(["a"], ids=[1]) | {"prompt_token_ids": [4, 5]},
            event(["b", "c"], ids=[2, 3], best=[{"b": -0.5, "c": -1.0}, {"c": -0.5}]),
            event(["<|eos|>"], ids=[0], reason="stop"),
            {"choices": [], "usage": {"prompt_tokens": 2}},
        ]
    )
    assert served.tokens == [1, 2, 3, 0] and served.steps == [1, 2, 1] and served.has_ended and not served.is_cut
    assert served.likeliest == [{}, {2: -0.5, 3: -1.0}, {3: -0.5}, {}] and not served.is_named
    assert served.read == [4, 5] and served.prompt_tokens == 2


@pytest.mark.parametrize("names", [["token_id:1", "token_id:3"], ["a", "c"]])
def test_ids_are_found_by_names(names: list[str]) -> None:
    """Guards servers that do not tell ids, and those that tell them as names."""
    served = answered([event(names, reason="length", best=[{names[0]: -0.5}, {names[1]: -0.5, "token_id:7": -3.0}])])
    assert served.tokens == [1, 3] and served.likeliest == [{1: -0.5}, {3: -0.5, 7: -3.0}]
    assert served.is_named == (names == ["a", "c"])


def test_llama_cpps_field_of_ids_is_read() -> None:
    """Guards the only server that tells ids there; its -inf is null."""
    entry = {"id": 9, "token": "?", "bytes": [63], "logprob": -0.5}
    best = [entry, {"id": 4, "token": "??", "logprob": None}]
    told = {"content": [entry | {"top_logprobs": best}]}
    served = answered([{"choices": [{"text": "?", "logprobs": told, "finish_reason": "length"}]}])
    assert served.tokens == [9] and served.likeliest == [{9: -0.5}] and not served.is_named


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        ([event(["a", "b"]), event([], reason="stop")], [3]),
        ([event(["a", "b"]), event([""], reason="stop")], [2, 1]),
        ([event(["a", "b"]), event(["<|eos|>"], reason="stop")], [2, 1]),
        ([event(["a", "b", "<|eos|>"], ids=[1, 2, 0]), event([], reason="stop")], [3]),
    ],
)
def test_an_end_is_known_however_it_is_told(events: Events, steps: list[int]) -> None:
    """Guards the last token: an end is part of what a server has chosen."""
    served = answered(events)
    assert served.tokens == [1, 2, END] and served.steps == steps and served.has_ended


def test_another_end_is_itself() -> None:
    """Guards models with several ends."""
    assert answered([event(["a", "e"], ids=[1, OTHER_END], reason="stop")]).tokens == [1, OTHER_END]


def test_an_answer_may_be_nothing_but_its_end() -> None:
    """Guards empty answers."""
    served = answered([event([], reason="stop")])
    assert served.tokens == [END] and served.logprobs == [None] and served.steps == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_are_those_of_several_cut_an_answer(kind: str) -> None:
    """Guards names: each token is either told from all others, or one of those that cut an answer and count as one."""
    tokenizer = KINDS[kind]()
    rows = used_rows(tokenizer) + 2  # the last two are no token
    repeats: Script = lambda asked, number: Reply(body=stream([event([asked, asked], reason="length")]))  # noqa: E731
    with Server(repeats) as server:
        endpoint = reader(server.url, tokenizer, rows=rows, end_ids=frozenset())
        names = [
            (token, name)
            for token in [*range(0, rows, 8), *range(250, rows)]  # of the single bytes some
            for name in {
                str(tokenizer.decode([token])),
                *(name for name, ids in endpoint.ids_of.items() if token in ids),
            }
        ]
        questions = [replace(ASK, prompt=name) for _, name in names]
        for (token, _), served in zip(names, endpoint.answers(questions, lambda _: None), strict=True):
            if token in endpoint.ambiguous:
                assert served.is_cut and served.tokens == [min(endpoint.ambiguous)] and not served.steps
            else:
                assert not served.is_cut and served.tokens == [token, token]
    assert len(endpoint.ambiguous) < 0.9 * rows or kind.startswith("byte")


def test_names_that_no_token_has_are_one_line() -> None:
    """Guards audits with another model's tokenizer."""
    events = [event(["a", "€"]), event([], reason="length")]
    assert_refused(events, "names a token '€', which the tokenizer of the target does not have")


def chosen(**choice: Any) -> Events:
    """A stream of one chunk."""
    return [{"choices": [{"finish_reason": "length"} | choice]}]


def told(names: list[Any], logprobs: list[Any]) -> Events:
    return chosen(logprobs={"tokens": names, "token_logprobs": logprobs})


NONE, UNREADABLE = (
    "gives no logprobs, and without them ties cannot be told from faults",
    "gives logprobs that cannot be read",
)
NO_STREAM = "is no stream of events: is it OpenAI-compatible?"
NO_ANSWERS: dict[str, tuple[Events | bytes, str]] = {
    "no logprobs": (chosen(text="a", logprobs=None), NONE),
    "no logprobs in chat": (chosen(delta={"content": "a"}), NONE),
    "no logprobs beside ids": (chosen(text="", token_ids=[1]), NONE),
    "empty logprobs": (chosen(text="a", logprobs={"content": []}), NONE),
    "no stream": (json.dumps({"choices": [{"text": "a"}]}).encode(), NO_STREAM),
    "HTML": (b"<html>data: hello</html>", NO_STREAM),
    "no JSON": (b"data: {\n\n", "is no JSON object"),
    "a list": (b"data: []\n\n", "is no JSON object"),
    "an error": ([event(["a"]), {"error": {"message": "no memory"}}], "the answer broke off: {'message': 'no memory'}"),
    "no end": ([event(["a"])], "does not end its answer to prompt 3 (finish_reason None)"),
    "an end that is none": ([event(["a"], reason="tool_calls")], "(finish_reason 'tool_calls')"),
    "too few ids": ([event(["a", "b"], ids=[1], reason="length")], UNREADABLE),
    "an id that is no number": (told(["token_id:x"], [-1.0]), UNREADABLE),
    "a name that is a number": (told([7], [-1.0]), UNREADABLE),
    "logprobs that are a list": (chosen(logprobs=[1]), UNREADABLE),
    "choices that are a text": ([{"choices": ["a"]}], UNREADABLE),
    "choices that are a number": ([{"choices": 7}], UNREADABLE),
    "a probability above 1": (told(["a"], [0.7]), UNREADABLE),
    "a logprob that is no number": (told(["a"], [float("nan")]), UNREADABLE),
    "no logprob of a token": (told(["a"], [None]), UNREADABLE),
    "fewer logprobs than tokens": (told(["a", "b"], [-1.0]), UNREADABLE),
}


@pytest.mark.parametrize("kind", NO_ANSWERS)
def test_what_is_no_answer_is_one_line(kind: str) -> None:
    """Guards users against tracebacks and hangs."""
    events, words = NO_ANSWERS[kind]
    assert_refused(events, words)


@pytest.mark.parametrize("read", ["abc", [], ["a"], None, 7])
def test_ids_of_prompts_that_are_none_are_not_believed(read: object) -> None:
    """Guards servers that have another field of that name."""
    served = answered([event(["a"], reason="length") | {"prompt_token_ids": read, "usage": {"prompt_tokens": "7"}}])
    assert served.read is None and served.prompt_tokens is None


def test_a_server_that_is_down_is_one_line() -> None:
    """Guards the most frequent mistake."""
    with Server() as server:
        url = server.url
    with pytest.raises(ValueError, match="cannot be reached"):
        reader(url).check_model()
    with pytest.raises(ValueError, match="broke off at prompt 3"):
        reader(url).answers([ASK], lambda _: None)


def test_a_server_that_goes_is_one_line() -> None:
    """Guards long audits: the connection may be lost in the middle."""
    with Server(always(Reply(drop=True))) as server, pytest.raises(ValueError, match="broke off at prompt 3"):
        reader(server.url).answers([ASK], lambda _: None)


def test_a_server_that_hangs_is_one_line() -> None:
    """Guards audits of the night."""
    hangs = always(Reply(body=stream([event(["a"], reason="length")]), delay_s=1.0))
    with Server(hangs) as server, pytest.raises(ValueError, match=r"has not answered prompt 3 within 0\.1 s"):
        reader(server.url, timeout_s=0.1).answers([ASK], lambda _: None)


def test_another_model_or_address_is_one_line() -> None:
    """Guards names that are misspelt."""
    with Server(always(Reply(status=404, body={"error": {"message": "no such model"}}))) as server:
        with pytest.raises(ValueError, match="has no model 'other': it has tiny"):
            reader(server.url, model="other").check_model()
        with pytest.raises(ValueError, match="status 404: no such model"):
            reader(server.url, model="other").answers([ASK], lambda _: None)
        with pytest.raises(ValueError, match="has no /models: its address most often ends in /v1"):
            reader(server.url.removesuffix("/v1")).check_model()
    with pytest.raises(ValueError, match="write it like http://localhost:8000/v1"):
        reader("localhost:8000").check_model()


def test_the_key_is_sent() -> None:
    """Guards servers that want one."""
    with Server(always(Reply(body=stream([event(["a"], reason="length")])))) as server:
        reader(server.url, api_key="secret").answers([ASK], lambda _: None)
        assert server.keys == ["Bearer secret"]
        assert "secret" not in repr(reader(server.url, api_key="secret"))


def test_what_a_server_does_not_know_is_not_asked_again() -> None:
    """Guards servers of others: extensions first, then fewer probabilities, are left out, once for all questions."""

    def script(asked: str, number: int) -> Reply:
        body = server.bodies[-1]
        if "top_k" in body:
            return Reply(status=400, body={"error": {"message": "unknown parameter top_k"}})
        if body["logprobs"] > 5:
            return Reply(status=422, body={"detail": "at most 5 logprobs"})
        return Reply(body=stream([event(["a"], reason="length")]))

    with Server(script) as server:
        endpoint = reader(server.url)
        questions = [ServerPrompt(number=n, prompt=f"p{n}", max_new_tokens=8, likeliest=20) for n in range(4)]
        assert len(endpoint.answers(questions, lambda _: None, 1)) == 4
        asked = len(server.bodies)
        endpoint.answers(questions, lambda _: None, 1)
        assert asked <= 4 + 5 and len(server.bodies) == asked + 4
        assert server.bodies[-1]["logprobs"] == 5 and "top_k" not in server.bodies[-1]


def test_what_a_server_refuses_anyhow_is_its_own_words() -> None:
    """Guards against trying for ever: a prompt may be too long."""
    with Server(always(Reply(status=400, body={"error": {"message": "prompt too long"}}))) as server:
        with pytest.raises(ValueError, match="gives status 400: prompt too long"):
            reader(server.url).answers([ASK], lambda _: None)
        assert len(server.bodies) < 12


@pytest.mark.parametrize("drafts", [1.0, 1000.0])
def test_counters_of_others_say_nothing(drafts: float) -> None:
    """Guards busy servers: their counters are of other requests too."""
    served = answered([event(["a"]), event(["b", "c"]), event(["d"], reason="length")])
    before, after = Counters(drafts=0.0, accepted=0.0), Counters(drafts=drafts * 2, accepted=drafts * 20)
    assert (fault_of_counters(before, after, [served], 4) is None) == (drafts > 1)
    assert fault_of_counters(None, after, [served], 4) is None


def test_a_server_without_metrics_has_no_counters() -> None:
    """Guards servers of others."""
    with Server() as server:
        assert counters_of(reader(server.url)) is None
    assert counters_of(reader(server.url)) is None

"""What is sent to a server, and what counts as an answer, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.asking import ask, client, prompts
from tests.support.endpoint_server import MODEL, Reply, Server, completion


def test_prompts_and_conversations_are_asked_as_the_protocol_wants(tmp_path: Path) -> None:
    """Guards path, fields, the key, and the new answers in the later turns of a conversation."""
    user, old = {"role": "user", "content": "q"}, {"role": "assistant", "content": "old"}
    with Server() as server:
        answers = ask(
            client(server, api_key="k", fields={"top_k": 0}), tmp_path, {"prompt": "p"}, {"messages": [user, old, user]}
        )[1]
    found = dict(zip(server.paths, server.bodies, strict=True))
    seed = found["/v1/completions"].pop("seed")
    asked = {"model": MODEL, "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
    assert found["/v1/completions"] == {**asked, "prompt": "p"}
    prompt, talk = sorted(answers, key=lambda answer: "messages" in answer)
    assert (prompt["response"], prompt["finish_reason"]) == (f"p:{seed}", "eos")
    first, second = (body["seed"] for body in server.bodies if "messages" in body)
    new = [user, {"role": "assistant", "content": f"q:{first}"}, user, {"role": "assistant", "content": f"q:{second}"}]
    assert talk["messages"] == new
    assert found["/v1/chat/completions"] == {**asked, "seed": second, "messages": new[:3]}
    assert set(server.keys) == {"Bearer k"}


def test_variables_of_the_template_are_sent_with_conversations(tmp_path: Path) -> None:
    """Guards the field by its name at vLLM; prompts have no template, and a server may refuse the field there."""
    with Server() as server:
        thinking = client(server, chat_template_kwargs={"enable_thinking": False})
        ask(thinking, tmp_path, {"prompt": "p"}, {"messages": [{"role": "user", "content": "q"}]})
    found = dict(zip(server.paths, server.bodies, strict=True))
    assert found["/v1/chat/completions"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in found["/v1/completions"]
    with pytest.raises(ValueError, match=r"chat_template_kwargs=\{'enable_thinking': False\}, and now it is None"):
        ask(client(server), tmp_path, {"prompt": "p"})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"<html>", "not a completion: <html>"),
        ({"choices": []}, "not a completion"),
        (3, "not a completion"),
        (completion("/v1/completions", None), "no whole text"),
        (completion("/v1/completions", "a", "abort"), "finish_reason='abort'"),
        (completion("/v1/completions", "a", None), "finish_reason=None"),
        (b'{"choices": [{"text": "\\ud800", "finish_reason": "stop"}]}', "half a character"),
    ],
)
def test_what_is_no_answer_is_not_written(tmp_path: Path, body: object, named: str) -> None:
    """Guards against training on half an answer, or stopping at a strange one."""
    with Server(lambda asked, _: Reply(body=body) if asked == "p0" else None) as server:
        progress, answers = ask(client(server), tmp_path, *prompts(2))
    assert [answer["prompt"] for answer in answers] == ["p1"]
    assert named in progress.failed[0].failure


def test_an_answer_cut_by_the_limit_says_so(tmp_path: Path) -> None:
    """Guards against an end of text that training would put after it."""
    with Server(lambda *_: Reply(body=completion("/v1/completions", "a", "length"))) as server:
        _, (answer,) = ask(client(server), tmp_path, {"prompt": "a"})
    assert answer["finish_reason"] == "length"


def test_a_server_that_hides_the_reasoning_is_refused(tmp_path: Path) -> None:
    """Guards against a drafter that never saw the half of what its target writes."""
    message = {"content": "4", "reasoning_content": "2 + 2"}
    reply = Reply(body={"choices": [{"message": message, "finish_reason": "stop"}]})
    with Server(lambda *_: reply) as server, pytest.raises(ValueError, match="reasoning parser"):
        ask(client(server), tmp_path, {"messages": [{"role": "user", "content": "2 + 2?"}]})

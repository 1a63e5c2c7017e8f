"""The endpoint's client against a real server that fails on demand."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paradraft.client import openai_client
from paradraft.data.endpoint import Endpoint
from paradraft.data.questions import ID, read_questions
from paradraft.data.regenerate import Outcome
from paradraft.sampling_params import Sampling
from tests.support.asking import SAMPLING, ask, client, prompts
from tests.support.endpoint_server import Reply, Server


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "BACKOFF_S", 0.001)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503])
def test_a_passing_error_is_tried_again(tmp_path: Path, status: int) -> None:
    """Guards against losing prompts to a server that is busy or starts again."""
    with Server(lambda _, number: Reply(status=status, body={}) if number < 3 else None) as server:
        progress, answers = ask(client(server), tmp_path, *prompts(3))
    assert len(answers) == 3 and not progress.failed
    assert len(server.bodies) == 12


def test_a_dropped_connection_and_a_slow_answer_are_tried_again(tmp_path: Path) -> None:
    """Guards against a worker that dies with its connection, or waits for ever."""

    def script(asked: str, number: int) -> Reply | None:
        return None if number else {"p0": Reply(drop=True), "p1": Reply(delay_s=0.4)}.get(asked)

    with Server(script) as server:
        progress, answers = ask(client(server, timeout_s=0.15), tmp_path, *prompts(3))
    assert len(answers) == 3 and not progress.failed
    assert server.seen == {"p0": 2, "p1": 2, "p2": 1}


def test_retry_after_is_waited_for(tmp_path: Path) -> None:
    """Guards against a client that a server with a limit has to ban."""
    headers = {"Retry-After": "0.3"}
    with Server(lambda _, number: None if number else Reply(status=429, body={}, headers=headers)) as server:
        start_s = time.monotonic()
        _, answers = ask(client(server), tmp_path, {"prompt": "a"})
    assert len(answers) == 1
    assert time.monotonic() - start_s > 0.3


def test_a_wait_longer_than_the_timeout_is_a_failure(tmp_path: Path) -> None:
    """Guards against a run that sleeps for a day because a header says so."""
    reply = Reply(status=503, body={}, headers={"Retry-After": "86400"})
    with Server(lambda asked, _: reply if asked == "p0" else None) as server:
        progress, answers = ask(client(server), tmp_path, *prompts(2))
    assert len(answers) == len(progress.failed) == 1
    assert server.seen["p0"] == 1


@pytest.mark.parametrize("status", [400, 403, 413, 422, 301])
def test_a_refusal_is_not_tried_again_and_costs_no_other_answer(tmp_path: Path, status: int) -> None:
    """Guards against stopping a long run at one prompt that is too long, and against asking for it five times."""
    refusal = Reply(status=status, body={"error": {"message": "too\nlong"}})
    with Server(lambda asked, _: refusal if asked == "p1" else None) as server:
        progress, answers = ask(client(server), tmp_path, *prompts(3))
        assert {answer["prompt"] for answer in answers} == {"p0", "p2"}
        (failed,) = progress.failed
        assert failed.failure == f"status {status}: too long"
        assert server.seen["p1"] == 1
        server.script = lambda asked, number: None
        progress, answers = ask(client(server), tmp_path, *prompts(3))
    assert (progress.before, progress.written) == (2, 1)
    assert server.seen["p0"] == 1, "what is there is not asked for again"
    assert {answer["prompt"] for answer in answers} == {"p0", "p1", "p2"}


@pytest.mark.parametrize("status", [401, 402, 404])
def test_what_every_prompt_would_get_stops_the_run(tmp_path: Path, status: int) -> None:
    """Guards against a million requests with the wrong key."""
    with Server(lambda *_: Reply(status=status, body={"message": "no such model"})) as server:
        with pytest.raises(ValueError, match=f"status {status}: no such model"):
            ask(client(server), tmp_path, *prompts(50))
        assert len(server.bodies) <= 8


def test_a_server_that_is_down_is_left_alone(tmp_path: Path) -> None:
    """Guards against hours of retries for every prompt of a long file; a worker or two more may fail than the limit."""
    with Server(lambda asked, _: None if asked == "p0" else Reply(status=500, body={})) as server:
        progress, answers = ask(client(server, retries=1), tmp_path, *prompts(100))
    assert len(answers) == 1
    assert progress.missing == 99
    assert 8 <= len(progress.failed) <= 12


def test_concurrency_is_bounded_and_used(tmp_path: Path) -> None:
    """Guards the server against all prompts at once, and the user against one at a time."""
    with Server(delay_s=0.03) as server:
        _, answers = ask(client(server, concurrency=5), tmp_path, *prompts(20))
    assert len(answers) == 20
    assert server.most_in_flight == 5


def test_the_same_seed_asks_the_same_in_any_order(tmp_path: Path) -> None:
    """Guards against seeds that depend on concurrency, order, or what was done before."""
    found = []
    for concurrency in (1, 7):
        folder = tmp_path / str(concurrency)
        folder.mkdir()
        with Server() as server:
            _, answers = ask(client(server, concurrency=concurrency), folder, *prompts(8)[::concurrency])
            _, answers = ask(client(server, concurrency=concurrency), folder, *prompts(8))
        found.append(sorted(json.dumps(answer) for answer in answers))
    assert found[0] == found[1]


def test_a_conversation_without_room_ends_there(tmp_path: Path) -> None:
    """Guards against losing the first turns of a conversation, for ever, because its last does not fit."""
    user = {"role": "user", "content": "q"}
    old = {"role": "assistant", "content": "old"}
    with Server(lambda _, number: Reply(status=400, body={}) if number == 1 else None) as server:
        progress, (answer,) = ask(client(server), tmp_path, {"messages": [user, old, user, old]})
    assert len(answer["messages"]) == 2
    assert answer["finish_reason"] == "eos"
    assert progress.shortened == 1


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (Reply(status=404, body={}), "ends in /v1"),
        (Reply(status=401, body={}), "--api-key-env"),
        (Reply(status=503, body={"message": "loading"}), "status 503: loading"),
        (Reply(body={"data": [{"id": "other"}]}), "no model 'tiny': it has other"),
        (Reply(body="hello"), "OpenAI-compatible"),
        (Reply(drop=True), "cannot be reached"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_found_before_any_work(tmp_path: Path, models: Reply, named: str) -> None:
    """Guards against a file, and a thousand failures, for a wrong address."""
    with Server() as server:
        server.models = models
        with pytest.raises(ValueError, match="endpoint http") as error:
            ask(client(server), tmp_path, {"prompt": "a"})
    assert named in str(error.value)
    assert not server.bodies
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "localhost:8000"}, "http://localhost:8000/v1"),
        ({"url": "http://"}, "'http://'"),
        ({"url": "http://x:port/v1"}, "x:port"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"retries": -1}, "retries=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"fields": {"n": 2}}, "'n'"),
        (
            {"fields": {"chat_template_kwargs": {}}, "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs is given tw",
        ),
        ({"sampling": Sampling(repetition_penalty=1.1)}, "only temperature"),
    ],
)
def test_bad_settings(settings: dict[str, Any], named: str) -> None:
    """Guards against settings that are silently ignored, and values that no request can have."""
    good: dict[str, Any] = {"url": "http://x/v1", "model": "m", "sampling": SAMPLING, "max_new_tokens": 5}
    with pytest.raises(ValueError, match=r"\w") as error:
        Endpoint(**{**good, **settings})
    assert named in str(error.value)


def test_the_key_is_not_shown(tmp_path: Path) -> None:
    """Guards the key against tracebacks and the settings file."""
    with Server() as server:
        endpoint = client(server, api_key="secret")
        ask(endpoint, tmp_path, {"prompt": "a"})
    assert "secret" not in repr(endpoint)
    assert not any("secret" in file.read_text() for file in tmp_path.iterdir())


def test_a_full_disk_stops_the_run_with_its_own_error(tmp_path: Path) -> None:
    """Guards against an exception group, which says nothing in a line, and against going on without writing."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def take(outcome: Outcome) -> None:
        raise OSError(28, "No space left on device")

    with Server() as server, pytest.raises(OSError, match="No space left"):
        client(server).answer(read_questions(tmp_path / "prompts.jsonl", 1), take)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Guards what this command promises: after SIGKILL in the middle all finished answers are there, none is asked for
    or written again, and at most those in flight were lost."""
    out, number, concurrency = tmp_path / "out.jsonl", 40, 4
    with Server(delay_s=0.01) as server:
        fork = multiprocessing.get_context("fork")
        endpoint = client(server, concurrency=concurrency)
        child = fork.Process(target=ask, args=(endpoint, tmp_path, *prompts(number)))
        child.start()
        while not out.exists() or out.read_bytes().count(b"\n") < number // 3:
            time.sleep(0.002)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        time.sleep(0.05)
        before = [json.loads(line)["prompt"] for line in out.read_bytes().split(b"\n")[:-1]]
        assert number // 3 <= len(before) < number
        asked = server.seen.copy()
        assert asked.total() - len(before) <= concurrency
        progress, answers = ask(endpoint, tmp_path, *prompts(number))
    assert progress.before == len(before)
    assert len({answer[ID] for answer in answers}) == len(answers) == number
    assert all(server.seen[prompt] == 1 for prompt in before)

"""Who is refused, who waits, who leaves, and how a server ends."""

from __future__ import annotations

import gc
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from paradraft.serve import endpoint
from paradraft.serve.address import key_of
from paradraft.serve.exchange import ApiError
from paradraft.serve.limits import Limits
from tests.support.serving import MODEL, Serving, serving, until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 90, "temperature": 0, "logit_bias": {"0": -100}}


class Gate:
    """Holds the engine before its rounds."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.rounds, self.most_rows, self._open, self._step = 0, 0, threading.Event(), engine._scheduler.batch.step
        self.batch = engine._scheduler.batch
        patch.setattr(engine._scheduler.batch, "step", self.step)

    def step(self) -> object:
        self.most_rows = max(self.most_rows, len(self.batch.generations))
        while not self._open.wait(0.01):
            pass
        self.rounds += 1
        return self._step()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Gate(engine, monkeypatch)
    yield found
    found.open()
    # What was cancelled while the gate was closed still takes its round.
    until(lambda: not engine._scheduler._is_watching)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error of a response, whose shape is OpenAI's."""
    (key,) = response.json()
    error = response.json()["error"]
    assert key == "error" and set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def test_rows_and_queue(engine: Engine, gate: Gate) -> None:
    """Guards --max-batch and --max-queue: two are decoded, three wait, the next is told to come again; all that were
    let in are answered."""
    with serving(engine, max_batch=2, max_queue=3) as running, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(running.post, "/v1/completions", LONG) for _ in range(5)]
        until(lambda: (running.admission.running, running.admission.waiting) == (2, 3))
        refused = running.post("/v1/completions", LONG)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "queue_full"
        counts = running.counts()
        assert (counts["vllm:num_requests_running"], counts["vllm:num_requests_waiting"]) == (2, 3)
        with pytest.raises(openai.RateLimitError):
            running.client().completions.create(model=MODEL, prompt="a")
        gate.open()
        texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
        assert len(texts) == 1 and gate.most_rows == 2
        too_many = running.post("/v1/completions", LONG | {"n": 6})
        assert too_many.status_code == 400 and "at most 5" in error_of(too_many)["message"]
        assert (running.admission.running, running.admission.waiting) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes(engine: Engine, gate: Gate, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards work for nobody: the row is free again, also that of a request which waits, and the next is answered."""
    gate.open()
    whole = engine.generate("hello", max_new_tokens=90, sampling=Sampling(logit_bias={0: -100}))
    gate.close()
    gate.rounds = 0
    read = []  # an answer is counted at its end only if its prompt was read before the client went
    decoded = endpoint.decoded
    monkeypatch.setattr(endpoint, "decoded", lambda *args: read.append(args) or decoded(*args))
    with serving(engine, max_batch=1, max_queue=3) as running:
        body = json.dumps(LONG | {"stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        clients = []
        for _ in range(2):
            clients.append(socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))))
            clients[-1].sendall(request)
        until(lambda: (running.admission.running, running.admission.waiting, len(read)) == (1, 1, 2))
        if stream:
            gate.open()
            gate.close()
        clients[1].close()
        until(lambda: running.admission.waiting == 0)
        assert running.admission.running == 1
        clients[0].close()
        until(lambda: running.admission.running == 0)
        gate.open()
        answer = running.post("/v1/completions", LONG).json()
        assert answer["choices"][0]["text"] == whole.text
        assert gate.rounds < 1.3 * len(whole.accepted), "nobody's answer was decoded to its end"
        assert running.ended("abort") == 2


def test_a_request_that_takes_too_long(engine: Engine, gate: Gate) -> None:
    with serving(engine, timeout_s=0.2) as running:
        late = running.post("/v1/completions", LONG)
        assert late.status_code == 408 and "0.2 s" in error_of(late)["message"]
        lines = running.post("/v1/completions", LONG | {"stream": True}).text
        assert running.admission.is_idle and "[DONE]" not in lines
        assert "took longer" in lines
    gate.open()


def test_an_error_in_a_stream(engine: Engine, running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards clients of streams that have begun: the last event is the error, which OpenAI's client raises. Neither it
    nor the log says what the exception says, which may be of a prompt."""
    step, rounds = engine._scheduler.batch.step, []

    def failing() -> object:
        rounds.append(1)
        if len(rounds) == 3:
            raise RuntimeError("the secret of the prompt")
        return step()

    monkeypatch.setattr(engine._scheduler.batch, "step", failing)
    stream = running.client().completions.create(model=MODEL, stream=True, **LONG)
    with pytest.raises(openai.APIError, match="the answer has failed") as raised:
        list(stream)
    assert "secret" not in str(raised.value)
    rounds.clear()
    assert running.post("/v1/completions", LONG).status_code == 500
    assert running.post("/v1/completions", LONG).status_code == 200


def test_what_failed_is_logged_without_its_words(
    engine: Engine, running: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(prompt: object) -> None:
        raise RuntimeError(f"cannot read {prompt}")

    monkeypatch.setattr(engine, "prompt_tokens", failing)
    assert running.post("/v1/completions", LONG).status_code == 500
    assert "RuntimeError" in caplog.text and LONG["prompt"] not in caplog.text


def test_long_bodies(running: Serving) -> None:
    """Guards memory: a body that says its length, and one that does not."""
    whole = running.post("/v1/completions", {"prompt": "a" * 20_000})
    assert whole.status_code == 413 and "20000 bytes" in error_of(whole)["message"]
    sent = 0

    def parts() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 4096
            yield b"a" * 4096

    headers = {"Content-Type": "application/json"}
    try:
        pieces = httpx2.post(f"{running.url}/v1/completions", content=parts(), headers=headers)
    except httpx2.TransportError:  # the connection is closed while there is more to send
        pieces = None
    assert pieces is None or pieces.status_code == 413
    assert sent < 4096 * 1000


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_client_that_sends_on(running: Serving, says_its_length: bool) -> None:
    """Guards clients that send all of a body before they read: if the connection is closed in the middle of it, they
    see it reset, and not that the body is too long."""
    body = b"a" * 60_000
    length = f"Content-Length: {len(body)}" if says_its_length else "Transfer-Encoding: chunked"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    content = body if says_its_length else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=5) as client:
        client.sendall(head.encode())
        for begin in range(0, len(content), 20_000):
            client.sendall(content[begin : begin + 20_000])
            time.sleep(0.1)
        found = b""
        while part := client.recv(10_000):
            found += part
    assert found.startswith(b"HTTP/1.1 413 ") and found.endswith(b"}}") and b"20000 bytes" in found


def test_a_client_that_never_ends_its_body(running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the connection of a client which is refused and sends no more: it is closed after some time."""
    monkeypatch.setattr("paradraft.serve.exchange.LINGER_S", 0.3)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 30000"
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=10) as client:
        begun_s = time.monotonic()
        client.sendall(f"{head}\r\n\r\n".encode())
        while client.recv(10_000):
            pass
        assert 0.2 < time.monotonic() - begun_s < 5.0


def test_a_key(engine: Engine) -> None:
    with serving(engine, key="s3cret") as running:
        for key in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            refused = running.post("/v1/completions", LONG, **key)
            assert refused.status_code == 401 and error_of(refused)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            running.client("wrong").models.list()
        assert running.client("s3cret").models.list().data[0].id == MODEL
        assert (
            running.post("/v1/completions", {**LONG, "max_tokens": 2}, Authorization="bearer s3cret").status_code == 200
        )
        assert httpx2.get(f"{running.url}/health").status_code == 200


def test_other_names_of_the_host(running: Serving) -> None:
    """Guards a server without a key against pages of other sites whose name has come to mean this machine."""
    for name in ("evil.example", "127.evil.example", "127.0.0.1.evil.example:80", "localhost:80@evil.example", "::1"):
        refused = httpx2.get(f"{running.url}/v1/models", headers={"Host": name})
        assert refused.status_code == 403 and error_of(refused)["type"] == "permission_error"
    for name in ("localhost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "LocalHost"):
        assert httpx2.get(f"{running.url}/v1/models", headers={"Host": name}).status_code == 200


def test_keys_and_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "abc")
    monkeypatch.setenv("WRONG", "a b")
    assert key_of(None, "127.0.0.1") is None and key_of("KEY", "0.0.0.0") == "abc"
    for variable, host, told in (
        (None, "0.0.0.0", "--api-key-env"),
        (None, "example.org", "--api-key-env"),
        ("NONE", "::1", "no such variable"),
        ("WRONG", "::1", "ASCII"),
    ):
        with pytest.raises(ValueError, match=told):
            key_of(variable, host)


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch", 0), ("max_queue", -1), ("timeout_s", 0), ("drain_s", -1), ("max_body_bytes", 1.5)]
)
def test_limits_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})


def test_the_end_waits_for_what_runs(engine: Engine, gate: Gate) -> None:
    """Guards restarts: what is under way is answered, what is new is refused, and the server is gone in time."""
    with serving(engine) as running, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(running.post, "/v1/completions", LONG)
        until(lambda: running.admission.running == 1)
        running.server.end()
        until(lambda: running.admission.is_closing)
        refused = running.post("/v1/completions", LONG)
        assert refused.status_code == 503 and error_of(refused)["code"] == "shutting_down"
        assert httpx2.get(f"{running.url}/health").status_code == 503
        assert running.thread.is_alive()
        gate.open()
        assert answer.result().status_code == 200
        running.thread.join(5)
        assert not running.thread.is_alive()


def test_the_end_does_not_wait_for_ever(engine: Engine, gate: Gate) -> None:
    with serving(engine, drain_s=0.1) as running, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(running.post, "/v1/completions", LONG)
        until(lambda: running.admission.running == 1)
        begun_s = time.monotonic()
        running.server.end()
        assert answer.result().status_code == 503
        running.thread.join(5)
        assert not running.thread.is_alive() and time.monotonic() - begun_s < 4
    gate.open()


def test_a_second_signal_ends_it_at_once(engine: Engine, gate: Gate) -> None:
    with serving(engine, drain_s=60) as running, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(running.post, "/v1/completions", LONG)
        until(lambda: running.admission.running == 1)
        running.server.handle_exit(signal.SIGTERM, None)
        until(lambda: running.admission.is_closing)
        assert running.thread.is_alive()
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(5)
        assert not running.thread.is_alive()
        assert answer.result().status_code == 503
    gate.open()


def test_no_error_keeps_its_request(running: Serving) -> None:
    """Guards memory: an error that is in a variable of its own traceback keeps all that is in these frames, such as a
    body of a megabyte, until Python looks for circles everywhere: hundreds of megabytes later."""
    wrong: list[bytes] = [
        b"a" * 30_000,
        b"{",
        b'{"prompt": []}',
        b'{"prompt": "a", "n": 0}',
        b'{"prompt": "a", "x": 1}',
    ]
    wrong += [b'{"prompt": "a", "max_tokens": 9999}', b'{"prompt": "a", "model": "b"}', b'{"prompt": "a", "n": 500}']
    gc.collect()
    gc.disable()
    try:
        for content in wrong:
            assert running.post_bytes("/v1/completions", content).status_code in (400, 404, 413)
            httpx2.post(
                f"{running.url}/v1/completions", content=iter([content]), headers={"Content-Type": "application/json"}
            )
        until(lambda: not [each for each in gc.get_objects() if type(each) is ApiError])
    finally:
        gc.enable()

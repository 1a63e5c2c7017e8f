"""Clients that send no HTTP, or slowly, or too much at once."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from paradraft.engine.engine import Engine
from paradraft.serve import connection
from tests.support.serving import Serving, serving, until

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def connected(running: Serving) -> Iterator[socket.socket]:
    port = int(running.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        yield client


def reply_of(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    found = b""
    while part := client.recv(10_000):
        found += part
    return found


def is_open(client: socket.socket) -> bool:
    """Whether the server has not closed the connection; waits a moment."""
    client.settimeout(0.05)
    try:
        return bool(client.recv(100))
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.parametrize("is_first", [True, False], ids=["first request", "next request"])
def test_headers_that_do_not_end(running: Serving, monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """Guards the number of connections against clients that send a byte now and then, or none."""
    monkeypatch.setattr(connection, "HEADERS_S", 0.5)
    with connected(running) as silent, connected(running) as slow:
        if not is_first:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert slow.recv(10_000).startswith(b"HTTP/1.1 200 ")
        begun_s = time.monotonic()
        while is_open(slow):
            slow.sendall(b"G")
            assert time.monotonic() < begun_s + 10.0
        assert 0.4 < time.monotonic() - begun_s < 3.0
        assert reply_of(silent) == b""
    assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_slow_answer_is_no_slow_request(engine: Engine, running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards answers and bodies, which may take longer than headers."""
    monkeypatch.setattr(connection, "HEADERS_S", 0.2)
    body = b'{"prompt": "a", "max_tokens": 1}'
    with connected(running) as client:
        client.sendall(f"{HEAD}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        time.sleep(0.5)
        client.sendall(body)
        assert reply_of(client).startswith(b"HTTP/1.1 200 ")


def test_more_connections_than_the_limit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the process's open files: a connection above the limit gets 503, and a later one is served."""
    with serving(engine) as running:
        running.admission.connections.most = 2
        with connected(running) as first, connected(running) as second:
            for client in (first, second):
                client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(10_000).startswith(b"HTTP/1.1 200 ")
            with connected(running) as third:
                assert reply_of(third).startswith(b"HTTP/1.1 503 ")
        until(lambda: not running.server.server_state.connections)
        assert httpx2.get(f"{running.url}/health").status_code == 200
        assert running.counts()["paradraft:refused_connections"] == 1


def test_fewer_files_than_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a process that may open few files: accepting connections must not be what reaches the limit."""
    for files, most in ((200, 72), (64, 1), (1 << 20, connection.MOST), (connection.resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(connection.resource, "getrlimit", lambda _, files=files: (files, files))
        assert connection.most_connections() == most


def test_malformed_requests_are_counted(running: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log against a line for each of them."""
    before = running.counts()["paradraft:malformed_requests"]
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            with connected(running) as client:
                client.sendall(b"\x16\x03\x01 no http\r\n\r\n")
                assert reply_of(client).startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert running.counts()["paradraft:malformed_requests"] == before + 3


def test_two_lengths(running: Serving) -> None:
    """Guards a proxy's other clients: a body that ends at two places (request smuggling)."""
    with connected(running) as client:
        client.sendall(f"{HEAD}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        reply = reply_of(client)
    assert reply.startswith(b"HTTP/1.1 400 ") and b"Transfer-Encoding" in reply


def test_bodies_in_flight(running: Serving) -> None:
    """Guards memory: each body is short enough, and all together are too long."""
    admission = running.admission
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert admission._most_bytes == 43 * 20_000
    admission._bytes = admission._most_bytes - len(body) + 1
    try:
        refused = running.post_bytes("/v1/completions", body)
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert running.post_bytes("/v1/completions", body[:1]).status_code == 400, "others are served"
    finally:
        admission._bytes = 0
    assert running.post_bytes("/v1/completions", body).status_code == 200
    until(lambda: not admission._bytes)

"""A server that speaks the OpenAI-compatible protocol, and fails on demand."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "tiny"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one request gets instead of an answer."""

    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drop: bool = False


Script = Callable[[str, int], Reply | None]
"""From what the user asked last, and how often that came before, to a failure; None answers."""


class Server:
    """Answers every prompt with a function of prompt and seed, and remembers what it was asked."""

    def __init__(self, script: Script = lambda asked, number: None, *, delay_s: float = 0.0) -> None:
        self.script, self.delay_s = script, delay_s
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.models = Reply(body={"data": [{"id": MODEL}]})
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(outer.models if self.path == "/v1/models" else Reply(status=404, body={}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(outer.handle(self.path, body, self.headers["Authorization"]))

            def reply(self, reply: Reply) -> None:
                if reply.drop:
                    self.close_connection = True
                    return
                content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:
                """Clients that were killed are part of the tests."""

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def handle(self, path: str, body: dict[str, Any], key: str | None) -> Reply:
        asked = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        with self.lock:
            self.bodies.append(body)
            self.paths.append(path)
            self.keys.append(key)
            number = self.seen[asked]
            self.seen[asked] += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            failure = self.script(asked, number)
            time.sleep(self.delay_s if failure is None else failure.delay_s)
        finally:
            with self.lock:
                self.in_flight -= 1
        return failure or Reply(body=completion(path, f"{asked}:{body['seed']}"))

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.shutdown()
        self.http.server_close()


def completion(path: str, text: object, reason: object = "stop") -> dict[str, object]:
    """The body of an answer, as vLLM has it."""
    content = (
        {"text": text} if path.endswith("/v1/completions") else {"message": {"role": "assistant", "content": text}}
    )
    return {"choices": [{"index": 0, **content, "finish_reason": reason}], "usage": {"completion_tokens": 3}}

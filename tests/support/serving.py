"""A server of ours in a thread, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from openai import OpenAI

from paradraft.engine import Engine
from paradraft.serve.admission import Admission
from paradraft.serve.app import new_app
from paradraft.serve.limits import Limits
from paradraft.serve.server import Server, bound, url_of

MODEL = "tiny"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server that runs."""

    url: str
    admission: Admission
    server: Server
    thread: threading.Thread

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def post(self, path: str, body: object, **settings: object) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=20, **settings)

    def counts(self) -> dict[str, float]:
        """The samples of /metrics by their names, without the model's."""
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.replace(f'model_name="{MODEL}"', "").replace("{}", ""): float(value) for name, value in pairs}


@contextmanager
def serving(engine: Engine, key: str | None = None, **limits: float) -> Iterator[Serving]:
    """Serves until the end of the block, and no longer."""
    listening = bound("127.0.0.1", 0)
    app, admission = new_app(engine, model=MODEL, limits=Limits(**{"drain_s": 5.0} | limits), key=key)
    server = Server(app, admission)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    url = url_of(listening)
    thread.start()
    try:
        until(lambda: server.started)
        yield Serving(url=url, admission=admission, server=server, thread=thread)
    finally:
        server.end()
        thread.join(10)
        listening.close()
    assert not thread.is_alive()


def until(holds: object, seconds: float = 10.0) -> None:
    """Waits until something holds."""
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it does not come to hold"
        time.sleep(0.005)

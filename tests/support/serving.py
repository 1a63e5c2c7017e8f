"""A server of ours in a thread, on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from paradraft.engine.engine import Engine
from paradraft.serve.address import bound, url_of
from paradraft.serve.admission import Admission, Server
from paradraft.serve.app import new_app
from paradraft.serve.limits import Limits

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

    def post(self, path: str, body: object, **headers: str) -> httpx2.Response:
        return self.post_bytes(path, json.dumps(body).encode(), **headers)

    def post_bytes(self, path: str, body: bytes, **headers: str) -> httpx2.Response:
        headers |= {"Content-Type": "application/json"}
        return httpx2.post(f"{self.url}{path}", content=body, timeout=20, headers=headers)

    def counts(self, **labels: str) -> dict[str, float]:
        """The samples of /metrics with these labels beside the model's, by their names."""
        wanted = labels | {"model_name": MODEL}
        families = text_string_to_metric_families(httpx2.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {sample.name: sample.value for sample in samples if sample.labels == wanted}

    def ended(self, reason: str) -> float:
        """How many answers have ended for a reason."""
        return self.counts(finished_reason=reason).get("vllm:request_success_total", 0)


@contextmanager
def serving(
    engine: Engine,
    key: str | None = None,
    defaults: Mapping[str, float] | None = None,
    names: Sequence[str] = (MODEL,),
    **limits: float,
) -> Iterator[Serving]:
    """Serves until the end of the block, and no longer."""
    listening = bound("127.0.0.1", 0)
    app, admission = new_app(
        engine, names=names, limits=Limits(**{"drain_s": 5.0} | limits), key=key, defaults=defaults
    )
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

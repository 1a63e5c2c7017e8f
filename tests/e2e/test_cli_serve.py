"""`paradraft serve`: what it refuses to start with, and a process from its start to its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paradraft.engine.engine import Engine
from paradraft.engine.loader import load_engine
from paradraft.sampling_params import Sampling
from paradraft.serve.address import bound
from tests.e2e.conftest import Paradraft, assert_mistake, drafting


def test_mistakes(family: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback, and against minutes of loading before a mistake is told."""
    monkeypatch.setattr("paradraft.engine.loader.load_engine", lambda *_, **__: pytest.fail("it was loaded"))
    serve = ["serve", *drafting(family, "pard")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_mistake(paradraft(*serve, "--port", port), f"--port {port}", "in use")
    assert_mistake(paradraft(*serve, "--host", "0.0.0.0"), "0.0.0.0", "--api-key-env")
    assert_mistake(paradraft(*serve, "--host", "no.such.host.invalid", "--api-key-env", "HOME"), "--host")
    assert_mistake(paradraft(*serve, "--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE")
    assert_mistake(paradraft(*serve, "--max-batch", 0), "max_batch=0")
    assert_mistake(paradraft(*serve, "--port", 65536), "--port")


def test_two_servers_that_start_together(family: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that says it is serving, and then that its port was taken while it loaded."""
    with bound("127.0.0.1", 0) as other:
        port = other.getsockname()[1]

        def load_late(*asked: Any, **settings: Any) -> Engine:
            other.listen()
            return load_engine(*asked, **settings)

        monkeypatch.setattr("paradraft.engine.loader.load_engine", load_late)
        found = paradraft("serve", *drafting(family, "pard"), "--port", port)
    assert_mistake(found, f"--port {port}", "in use")  # and no line that it is serving


def test_a_drafter_that_did_not_pay_is_said_at_the_end(
    family: Path, poor_draft: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards whoever serves with a drafter that makes answers slower against a log without a word of it."""

    def load_and_decode(*asked: Any, **settings: Any) -> Engine:
        engine = load_engine(*asked, **settings)
        engine.generate("helloworld", max_new_tokens=40, sampling=Sampling(temperature=1.0))
        return engine

    monkeypatch.setattr("paradraft.engine.loader.load_engine", load_and_decode)
    monkeypatch.setattr("paradraft.serve.admission.Server.run", lambda *_, **__: None)
    options = ["--target", family / "target", "--dtype", "float64", "--draft", poor_draft, "-k", 4, "--port", 0]
    *_, serving, last = paradraft("serve", *options, "--drafter", "autoregressive").err.splitlines()
    assert "serving" in serving
    assert last.startswith("note: drafting made this ") and last.endswith("try --lengths expected, or --drafter none")


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_process(family: Path, tmp_path: Path, kind: signal.Signals) -> None:
    """Guards the whole of it: it says where it is and what the model asks for, answers, and at a signal ends what it
    has begun, with exit code 0; nothing of the prompt is on its standard error."""
    folder = shutil.copytree(family / "target", tmp_path / "target")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.6, "top_k": 7}')
    models = ["--target", folder, *drafting(family, "pard")[2:]]
    command = [sys.executable, "-m", "paradraft", "serve", *map(str, models), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            assert any("do not say otherwise have temperature=0.6, top_k=7, as the model" in line for line in lines)
            url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
            schemas = httpx2.get(f"{url}/openapi.json").json()["components"]["schemas"]
            described = schemas["CompletionRequest"]["properties"]
            assert described["temperature"]["default"] == 0.6
            body = {"prompt": "hello", "max_tokens": 100, "stream": True, "logit_bias": {"0": -100}}
            with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
                events = answer.iter_lines()
                first = next(events)
                process.send_signal(kind)
                rest = [first, *filter(None, events)]
            assert rest[-1] == "data: [DONE]"
            told = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
            assert told[-1]["choices"][0]["finish_reason"] == "length"
            assert process.wait(10) == 0
            assert "hello" not in process.stderr.read()
        finally:
            process.kill()

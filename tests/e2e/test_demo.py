from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.demo import Size, converse, demo, fetched

from paradraft.drafters.none import NoDrafter
from paradraft.engine.answers import Chunk
from paradraft.engine.engine import Engine
from tests.support.gguf_files import tiny_model, write_gguf


@pytest.mark.slow
def test_figures_of_weights_that_are_no_longer_shipped_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a demo that shows, after an update, what it measured before, or does all again without one."""
    monkeypatch.chdir(tmp_path)
    out, size = Path("demo"), Size(steps=1, prompts=1, tokens=4)
    assert demo(out, size)
    report = json.loads((out / "results.json").read_text())
    report["demo"]["family"]["pard"] = "of an earlier version"
    (out / "results.json").write_text(json.dumps(report))
    assert demo(out, size)
    assert "measured before" not in capsys.readouterr().out

    assert demo(out, size)
    assert "measured before" in capsys.readouterr().out


def test_the_real_model_is_left_out_where_it_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards CI, which must neither download nor wait, and the demo of a machine without a network."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed}")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert not fetched(may_wait=False)
    assert "make real-models" in capfd.readouterr().out and not (tmp_path / "build").exists()
    assert not fetched(may_wait=True)
    (line,) = capfd.readouterr().err.splitlines()
    assert "cannot be had now" in line


def test_a_chat_model_answers_without_and_with_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards what the demo says of a real model: its answers, and whether they are the same; with a control."""
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), "Q8_0")
    assert converse(tmp_path / "tiny.gguf", {"abcabcabcabc": "It copies.", "x": "It does not."}, tokens=16)
    told = capsys.readouterr().out
    assert told.count(" tokens in ") == told.count("the same text") == 2 and "> abcabcabcabc" in told

    stream = Engine.stream

    def other(self: Engine, *arguments: Any, **settings: Any) -> Iterator[Chunk]:
        for chunk in stream(self, *arguments, **settings):
            yield chunk if isinstance(self.drafter, NoDrafter) else replace(chunk, tokens=chunk.tokens[:-1])

    monkeypatch.setattr(Engine, "stream", other)
    assert not converse(tmp_path / "tiny.gguf", {"abcabcabcabc": ""}, tokens=16)
    assert "ANOTHER TEXT" in capsys.readouterr().out

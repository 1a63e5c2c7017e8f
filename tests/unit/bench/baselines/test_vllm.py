"""vLLM in a process of its own: what it says is understood, and whatever goes wrong is one sentence."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paradraft.bench.baselines import vllm
from paradraft.bench.baselines.vllm import VllmProcess, check_vllm, without_vllm, worker_settings
from paradraft.bench.result import PeerCounts
from paradraft.bench.spec import Method
from paradraft.drafters.ngram import Config
from paradraft.sampling_params import GREEDY, Sampling
from tests.conftest import tiny_tokenizer
from tests.support.fake_vllm import executable, python

SPECULATIVE = {"method": "draft_model", "num_speculative_tokens": 3, "model": "draft"}
TARGET: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), eos_ids=frozenset([0]), capacity=128)


def process(runs: Path, speculative: dict[str, Any] | None = None, patience_s: float = 30.0) -> VllmProcess:
    given = {"model": "target", "dtype": "float32", "capacity": 128, "batch": 2, "compiled": False, "threads": 1}
    return VllmProcess("vllm-pard", runs, given | {"speculative": speculative}, TARGET, patience_s=patience_s)


def test_answers_and_counters_come_through(tmp_path: Path) -> None:
    """Guards the protocol, with the real worker: noise on its output, counters of this batch alone, memory, version."""
    with process(python(tmp_path), SPECULATIVE) as vllm:
        assert vllm.version == "0.0.fake"
        for _ in range(2):
            answer = vllm(["ab", "c"], 7, GREEDY)
            assert answer.tokens == [[1, 2, 1, 2, 1, 2, 1], [3] * 7]
            assert 0 < answer.total_s < 1 and (answer.peak_rss_bytes or 0) > 2**20 and answer.stats is None
            # Two rounds of each row, and the pass that read its prompt.
            assert answer.counts == PeerCounts(tokens=14, rounds=6, drafted=(4, 4, 4), accepted=(4, 4, 0))
    assert vllm._process.poll() == 0


def test_passes_without_a_draft_are_passes(tmp_path: Path) -> None:
    """Guards the acceptance length of n-grams, which find nothing for most passes: vLLM's counters leave those out."""
    code = """import json
input(); print('{"vllm": "1"}', flush=True); input()
print(json.dumps({"tokens": [[5] * 20], "total_s": 1.0, "peak_rss_bytes": 1, "drafts": [2], "accepted": [2, 1, 1]}))
input()"""
    with process(executable(tmp_path / "python", code), SPECULATIVE) as vllm:
        counts = vllm(["ab"], 20, GREEDY).counts
    assert counts is not None and (counts.tokens, counts.rounds) == (20, 16)


def test_without_a_drafter_nothing_is_counted(tmp_path: Path) -> None:
    """Guards against counters that a vLLM without a drafter does not have."""
    with process(python(tmp_path)) as vllm:
        assert vllm(["ab"], 3, GREEDY).counts is None


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import sys; sys.exit('no space left')", "ended with code 1: no space left"),
        ("print('Hello, I am vLLM')", "no reply: 'Hello, I am vLLM'"),
        ("print([1])", "no reply"),
        ("print('{}')", "no reply"),
        ("""print('{"error": "ImportError: no vllm"}')""", "vLLM: ImportError: no vllm"),
        ("import time; time.sleep(60)", "said nothing for 0 s"),
        ("""print('{"vllm": "1"}', flush=True); input(); input(); print('{"tokens": []}')""", "no reply"),
        ("""print('{"vllm": "1"}', flush=True); input(); input(); print('{"tokens": [], "total_s": 1, """
         """"peak_rss_bytes": 1}')""", "0 answers to 1 prompt"),
        ("""print('{"vllm": "1"}', flush=True); import os, signal; input(); input(); """
         """os.kill(os.getpid(), signal.SIGKILL)""", "ended with code -9"),
        ("import sys; sys.stdout.buffer.write(bytes([255, 10]))", "ended with code 0"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_in_a_sentence(code: str, named: str, tmp_path: Path) -> None:
    """Guards against a bench that hangs, or ends in a traceback, because of another program, or leaves one behind."""
    patience_s = 0.4 if "sleep" in code else 30.0
    vllm = process(executable(tmp_path / "python", code), patience_s=patience_s)
    began_s = time.perf_counter()
    with pytest.raises(ValueError, match="method 'vllm-pard': ") as raised, vllm:
        vllm(["a"], 3, GREEDY)
    assert named in str(raised.value)
    assert vllm._process.poll() is not None and time.perf_counter() - began_s < 20


def test_what_vllm_raises_comes_through(tmp_path: Path) -> None:
    """Guards the reasons that vLLM itself gives, when it loads and later; and a program that cannot be run."""
    with pytest.raises(ValueError, match="vLLM: OSError: no-such-draft: nothing is there"):
        process(python(tmp_path), SPECULATIVE | {"model": "no-such-draft"}).__enter__()
    with pytest.raises(ValueError, match="ended with code 7"), process(tmp_path / "python") as vllm:
        vllm(["a" * 13], 3, GREEDY)
    with pytest.raises(ValueError, match="cannot be run"):
        process(tmp_path / "modules" / "vllm.py").__enter__()


def test_vllm_that_is_not_installed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a bench that fails for want of a peer, or drops it without a word."""
    monkeypatch.chdir(tmp_path)
    methods = [Method.parse(spec) for spec in ("ar", "vllm", "vllm-pard:k=4")]
    left, skipped = without_vllm(methods, None)
    assert [method.spec for method in left] == ["ar"] and list(skipped) == ["vllm", "vllm-pard:k=4"]
    assert "make vllm" in skipped["vllm"]
    with pytest.raises(ValueError, match="only vllm, vllm-pard:k=4, but vLLM is not installed"):
        without_vllm(methods[1:], None)
    with pytest.raises(ValueError, match="there is no such file"):
        without_vllm(methods, tmp_path / "python")
    assert without_vllm(methods, Path(sys.executable)) == (methods, {})
    assert without_vllm(methods[:1], tmp_path / "python") == (methods[:1], {})


def test_what_cannot_be_compared_is_refused() -> None:
    """Guards against speeds of answers that are not the target's own."""
    methods = [Method.parse("ar"), Method.parse("vllm-pard")]
    runtime: Any = SimpleNamespace(device="cpu")
    check_vllm(methods, GREEDY, runtime)
    with pytest.raises(ValueError, match="greedy only"):
        check_vllm(methods, Sampling(temperature=0.5), runtime)
    with pytest.raises(ValueError, match="on the CPU only"):
        check_vllm(methods, GREEDY, SimpleNamespace(device="cuda"))
    check_vllm(methods[:1], Sampling(temperature=0.5), SimpleNamespace(device="cuda"))


def test_vllm_looks_up_what_our_drafter_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against peers that draft by other rules than ours."""
    monkeypatch.setattr(vllm, "locate", lambda name, role: f"{name}/{role}")
    given = worker_settings(Method.parse("vllm-ngram:k=6:batch=4"), "t", TARGET, compiled=True)
    assert given["model"] == "t/target" and given["batch"] == 4 and given["compiled"] and given["capacity"] == 128
    assert given["speculative"] == {
        "method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": Config().max_ngram, "prompt_lookup_min": 1,
    }  # fmt: skip

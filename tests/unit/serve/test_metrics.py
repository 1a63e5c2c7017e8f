"""What /metrics says is what was done."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from paradraft.decode.payoff import Payoff
from paradraft.engine.engine import Engine
from paradraft.sampling_params import Sampling
from tests.support.serving import serving


def test_counts(engine: Engine) -> None:
    """Guards counters against the statistics of the engine, which counts for itself."""
    body: dict[str, Any] = {"prompt": ["hello", "abc"], "max_tokens": 25, "temperature": 0.8, "seed": 3, "n": 2}
    samplings = [Sampling(temperature=0.8, seed=seed) for seed in (3, 4)]
    wanted = [
        engine.generate(prompt, max_new_tokens=25, sampling=sampling)
        for prompt in ("hello", "abc")
        for sampling in samplings
    ]
    plain = engine.generate("a", max_new_tokens=5, sampling=Sampling(logit_bias={0: -100}))
    with serving(engine) as running:
        assert running.counts()["vllm:generation_tokens_total"] == 0
        begun_s = time.perf_counter()
        assert running.post("/v1/completions", body).status_code == 200
        last = {"prompt": "a", "max_tokens": 5, "temperature": 0, "logit_bias": {"0": -100}, "speculation": "off"}
        assert running.post("/v1/completions", last | {"stream": True}).status_code == 200
        assert running.post("/v1/completions", {"prompt": ""}).status_code == 400
        took_s = time.perf_counter() - begun_s
        counts = running.counts()
        tokens = sum(len(result.tokens) for result in wanted) + len(plain.tokens)
        assert counts["vllm:prompt_tokens_total"] == 2 * 5 + 2 * 3 + 1
        assert counts["vllm:generation_tokens_total"] == tokens
        drafted = [sum(result.stats.drafted[place] for result in wanted) for place in range(4)]
        accepted = [sum(result.stats.accepted[place] for result in wanted) for place in range(4)]
        assert counts["vllm:spec_decode_num_drafts_total"] == drafted[0] > 0
        assert counts["vllm:spec_decode_num_draft_tokens_total"] == sum(drafted)
        assert counts["vllm:spec_decode_num_accepted_tokens_total"] == sum(accepted) > 0
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert [running.counts(position=str(place)).get(name, 0) for place in range(4)] == accepted
        rounds = sum(len(result.accepted) for result in wanted) + 5
        assert counts["vllm:time_to_first_token_seconds_count"] == 5
        assert counts["vllm:inter_token_latency_seconds_count"] == rounds - 5
        assert counts["vllm:e2e_request_latency_seconds_count"] == 5
        assert 0 < counts["vllm:time_to_first_token_seconds_sum"] < counts["vllm:e2e_request_latency_seconds_sum"]
        assert counts["vllm:e2e_request_latency_seconds_sum"] < 5 * took_s
        ended = [result.finish_reason for result in wanted]
        assert running.ended("length") == ended.count("length") + 1
        assert running.ended("stop") == ended.count("eos")
        assert (counts["vllm:num_requests_running"], counts["vllm:num_requests_waiting"]) == (0, 0)


def test_slow_passes_are_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a server that is several times slower than it could be against being so without a word."""
    with serving(engine) as running:
        assert running.counts()["paradraft:slow_models"] == 0
    monkeypatch.setattr(engine.target.lm, "refusals", ["the formula is another"])
    with serving(engine) as running:
        assert running.counts()["paradraft:slow_models"] == 1


def test_what_drafting_gains_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whoever watches a server: the ratio to rounds without drafts, and none before it is known."""
    monkeypatch.setattr(engine.lengths, "payoff", payoff := Payoff())
    with serving(engine) as running:
        assert math.isnan(running.counts()["paradraft:drafting_speedup"])
        for _ in range(30):
            payoff.add_plain(2, 0.010)
            payoff.add(2, seconds=0.030, pass_s=0.030, worth=1.5, drafting=2, tokens=3)
        assert running.counts()["paradraft:drafting_speedup"] == pytest.approx(0.5)
